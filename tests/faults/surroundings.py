"""Creates surroundings in which the kernel causes a fault: a control group with little memory, and a mount namespace
with a small /dev/shm, in which a fault can mount file systems too.

Only root can create them, and not in every container.
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
SPARE_BYTES = 256 << 20  # so that the process which uses them up is the largest one, which the kernel kills
SMALL_SHM = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=32m shm /dev/shm && exec "$@"', "sh"]


@dataclass(frozen=True)
class Surroundings:
    """Holds a ``prefix`` for an agent's command, ``variables`` for its environment and possible ``kinds`` of fault."""

    prefix: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    kinds: tuple[str, ...] = ()


@contextmanager
def surroundings() -> Iterator[Surroundings]:
    """Creates the surroundings that this machine permits; ``kinds`` lists the faults that are possible in them."""
    shm = subprocess.run([*SMALL_SHM, "true"], check=False, capture_output=True).returncode == 0
    with _memory_group() as group:
        yield Surroundings(
            tuple(SMALL_SHM) if shm else (),
            {GROUP: str(group)} if group else {},
            (*(["memory_limit"] if group else []), *(["shared_memory", "read_only"] if shm else [])),
        )


def enter_memory_group() -> None:
    """Moves this process to the memory group; the processes that it starts are then members too."""
    if GROUP in os.environ:
        group = Path(os.environ[GROUP])
        _limit(group).write_text(str(MEMORY_BYTES))
        (group / "cgroup.procs").write_text(str(os.getpid()))


def leave_little_memory() -> None:
    """Lowers the limit of the group, so that a process reaches it soon; the next agent raises it again."""
    group = Path(os.environ[GROUP])
    used = next(path for name in ("memory.usage_in_bytes", "memory.current") if (path := group / name).exists())
    _limit(group).write_text(str(min(MEMORY_BYTES, int(used.read_text()) + SPARE_BYTES)))


def _limit(group: Path) -> Path:
    return next(path for name in ("memory.limit_in_bytes", "memory.max") if (path := group / name).exists())


@contextmanager
def _memory_group() -> Iterator[Path | None]:
    """Creates a control group below this process's own, and yields None if that is impossible."""
    own = {line.split(":")[1]: line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines()}
    top = "memory" if "memory" in own else ""
    group = Path("/sys/fs/cgroup", top, own.get(top, "/").lstrip("/"), f"hpc_train-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError:
        yield None
        return
    try:
        _limit(group).write_text(str(MEMORY_BYTES))
        made: Path | None = group
    except (OSError, StopIteration):  # this group cannot limit memory
        made = None
    try:
        yield made
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    until = time.monotonic() + 10
    while group.exists() and time.monotonic() < until:
        with suppress(OSError):  # some processes of the group are still ending
            group.rmdir()
        time.sleep(0.05)
