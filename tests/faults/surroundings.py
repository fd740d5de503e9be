"""What a run is put into to be struck by the kernel itself: a control group with little memory, a small /dev/shm.

Only root can make them, and not in every container.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

GROUP = "HPC_TRAIN_TEST_MEMORY_GROUP"
MEMORY_BYTES = 1536 << 20
SMALL_SHM = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=32m shm /dev/shm && exec "$@"', "sh"]


@dataclass(frozen=True)
class Surroundings:
    """``prefix`` goes before the command of an agent, ``variables`` into its environment."""

    prefix: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    kinds: tuple[str, ...] = ()


@contextmanager
def surroundings() -> Iterator[Surroundings]:
    """Those that can be made here; ``kinds`` of faults are possible in them."""
    shm = subprocess.run([*SMALL_SHM, "true"], check=False, capture_output=True).returncode == 0
    with _memory_group() as group:
        yield Surroundings(
            tuple(SMALL_SHM) if shm else (),
            {GROUP: str(group)} if group else {},
            (*(["memory_limit"] if group else []), *(["shared_memory"] if shm else [])),
        )


def enter_memory_group() -> None:
    """With all processes that this one starts."""
    if GROUP in os.environ:
        Path(os.environ[GROUP], "cgroup.procs").write_text(str(os.getpid()))


@contextmanager
def _memory_group() -> Iterator[Path | None]:
    """Below this process's own; None where that cannot be."""
    own = {line.split(":")[1]: line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines()}
    top, limit = ("memory", "memory.limit_in_bytes") if "memory" in own else ("", "memory.max")
    group = Path("/sys/fs/cgroup", top, own.get(top, "/").lstrip("/"), f"hpc_train-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError:
        yield None
        return
    try:
        (group / limit).write_text(str(MEMORY_BYTES))
        made: Path | None = group
    except OSError:  # this group may not limit memory
        made = None
    try:
        yield made
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    until = time.monotonic() + 10
    while group.exists() and time.monotonic() < until:
        with suppress(OSError):  # processes that are about to end
            group.rmdir()
        time.sleep(0.05)
