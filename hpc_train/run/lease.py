"""One live attempt per run: the agent of node 0 holds a lock on a file in the run directory as long as it lives.

The kernel drops the lock with the process, however it ends, so a lease never has to be cleaned up.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpc_train.config.errors import ConfigError
from hpc_train.run.directory import RunDirectory


def is_live(run: RunDirectory) -> bool:
    """Whether an agent is at work on this run at this moment."""
    if not _path(run).exists():
        return False
    try:
        with hold(run):
            return False
    except ConfigError:
        return True


@contextmanager
def hold(run: RunDirectory) -> Iterator[None]:
    """Holds the run's lease inside the ``with`` block.

    Raises:
        ConfigError: another process holds it.
    """
    descriptor = os.open(_path(run), os.O_RDWR | os.O_CREAT, 0o666)  # not inherited by children
    try:
        _lock(descriptor, run)
        yield
    finally:
        os.close(descriptor)


def _path(run: RunDirectory) -> Path:
    return run.path / ".lease"


def _lock(descriptor: int, run: RunDirectory) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"the run in {run.path} is live: its agent is at work",
            where="run.name",
            mend="wait for it, stop it, or take another run.name",
        ) from None
