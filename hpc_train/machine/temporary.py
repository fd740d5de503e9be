"""Creates temporary directories. If their process is killed, the next agent of the user removes them.

A process that ends normally removes its directories. A file lock, which the kernel releases when the process ends,
marks a directory as in use. The name of the lock file contains the name of the node, because other nodes may not see
the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOCKETS, SCRIPTS, BENCH, TRACKING, JOB_CACHES = (
    "pymp-",
    "hpc_train-progress-",
    "hpc_train-bench-",
    "hpc_train-tracking-",
    "hpc_train-caches-",
)  # prefixes


@dataclass(frozen=True)
class TemporaryDirectory:
    """A directory that is in use until ``remove`` or ``keep`` is called, or until this process ends."""

    path: Path
    _lock: int | None  # descriptor of the lock; None without locks on the file system: no process then removes it

    @classmethod
    def make(cls, prefix: str, parent: Path) -> TemporaryDirectory:
        """Creates a directory in ``parent``, and removes directories that are no longer in use."""
        for known in (SOCKETS, SCRIPTS, BENCH, TRACKING, JOB_CACHES):
            for unused in parent.glob(f"{known}*/{_lock_name()}"):
                with contextlib.suppress(OSError):  # it belongs to another user, or is in use
                    descriptor = _lock(unused)
                    shutil.rmtree(unused.parent, ignore_errors=True)
                    os.close(descriptor)
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            lock = _lock(path / "new")
        except OSError:
            return cls(path, None)
        (path / "new").rename(path / _lock_name())  # visible to other processes once it is locked
        return cls(path, lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._release()

    def keep(self) -> None:
        """Lets the directory outlive this process."""
        (self.path / _lock_name()).unlink(missing_ok=True)
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)


def _lock_name() -> str:
    return f".hpc_train-alive-{os.uname().nodename}"


def _lock(path: Path) -> int:
    """Creates and locks a file; returns its descriptor, which holds the lock. Raises OSError if another process holds
    the lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
