"""Notices that somebody has deleted the run directory while the job runs.

Training would go on without it: nothing of the run could be resumed. A file system that is away, unmounted or does not
respond is something else: it may return with everything in it.
"""

from __future__ import annotations

import time

from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import BackgroundCall

LOOK_EVERY_S = 2.0
LOOK_S = 1.0  # the agent waits at most this long for the file system
LOOKS = 5  # in a row that must agree


class DeletionWatch:
    """Looks for ``config.yaml``, which exists as long as the run does."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._device = run.path.stat().st_dev
        self._look = BackgroundCall(self._is_deleted)
        self._next = 0.0
        self._agree = 0

    def finding(self) -> str | None:
        """Returns what has happened to a run directory that was deleted. It is called a few times per second."""
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + LOOK_EVERY_S
        try:
            self._agree = self._agree + 1 if self._look.poll(LOOK_S) else 0
        except OSError:  # it fails or hangs
            self._agree = 0
        if self._agree < LOOKS:
            return None
        return (
            f"the run directory {self._run.path} was deleted, or its config.yaml, while the job was running: the run "
            "cannot be resumed without its checkpoints. The job is stopped; start the run again under this or another "
            "run.name"
        )

    def _is_deleted(self) -> bool:
        if self._run.config.exists():
            return False
        path = next(path for path in (self._run.path, *self._run.path.absolute().parents) if path.exists())
        return path.stat().st_dev == self._device  # otherwise its file system is not mounted any more
