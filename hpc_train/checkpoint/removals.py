"""Removes files in the background on rank 0, so that no save waits for the unlinks of an old checkpoint.

A checkpoint of N ranks has N files, and a metadata server takes about a millisecond for each. The order of the steps
keeps this safe: a checkpoint is first renamed to a hidden name, or loses its marker, and that is synced; only then its
files are unlinked one by one (``CheckpointStore.prune``). A process that dies in between leaves a hidden directory,
which no run loads and which the next removal finishes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

_POLL_S = 0.2


@dataclass
class Removals:
    """Runs removals one after the other in one thread.

    Attributes:
        report: called in that thread with the exception of a removal that failed.
    """

    report: Callable[[Exception], None]
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _due: list[Callable[[], None]] = field(default_factory=list, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    @property
    def busy(self) -> bool:
        return self._thread is not None

    def start(self, removal: Callable[[], None]) -> None:
        """Runs ``removal`` after the ones that are running or due; returns at once. Any thread may call it.

        Each removal looks for all that is to be removed, so the ones that follow a slow one find little to do.
        """
        with self._lock:
            self._due.append(removal)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="remove-checkpoints", daemon=True)
                self._thread.start()

    def wait(self, give_up: Callable[[], bool] = lambda: False) -> None:
        """Waits until all removals are finished or ``give_up`` returns True."""
        while (thread := self._thread) is not None and not give_up():
            thread.join(_POLL_S)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._due:
                    self._thread = None
                    return
                removal = self._due.pop(0)
            try:
                removal()
            except Exception as error:
                self.report(error)
