"""What became of a worker that is gone without a word: from its exit code, and from what the kernel counts."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from hpc_train.cluster.oom_kills import OomKills
from hpc_train.run.exits import Failure, in_words

SHARED_MEMORY = Path("/dev/shm")
FULL = 0.01  # of it is left


def class_of_end(
    exit_code: int, killed: OomKills, with_warm_parent: bool = False, output: Sequence[str] = ()
) -> tuple[Failure, str]:
    """The class and one line.

    Args:
        exit_code: negative for a signal.
        with_warm_parent: it was killed because its warm parent ended.
        killed: processes that the kernel has killed for memory while the worker ran.
        output: the last lines that it printed.
    """
    if with_warm_parent:
        return Failure.KILLED, "killed by the kernel when the warm parent of the node's workers ended"
    if exit_code >= 0:
        return Failure.EXITED, f"exited early with code {exit_code}, without an exception"
    name = f"killed by {signal.Signals(-exit_code).name}"
    if exit_code == -signal.SIGKILL:
        return _killed(name, killed)
    if exit_code == -signal.SIGABRT:
        return _aborted(name, output)
    if exit_code == -signal.SIGBUS and _is_full(SHARED_MEMORY):
        return Failure.DISK_FULL, f"{name}: {SHARED_MEMORY} is full (batch.loader_workers=0 does without it)"
    return Failure.KILLED, name


def _killed(name: str, killed: OomKills) -> tuple[Failure, str]:
    if killed.group > 0:
        return Failure.OUT_OF_MEMORY, f"{name}: out of host memory, as the kernel counts (--mem, or a container's)"
    return Failure.KILLED, name + (" (the kernel killed for memory on this node)" if killed.node > 0 else "")


def _aborted(name: str, output: Sequence[str]) -> tuple[Failure, str]:
    """The watchdog thread of NCCL prints an error of the rank's GPU and aborts the process."""
    for line in output:
        failure = in_words(line)
        if failure in (Failure.DEVICE, Failure.KERNEL):
            return failure, f"{name}: {line.strip()}"
    return Failure.KILLED, name


def _is_full(path: Path) -> bool:
    try:
        found = os.statvfs(path)
    except OSError:
        return False
    return found.f_blocks > 0 and found.f_bavail < FULL * found.f_blocks
