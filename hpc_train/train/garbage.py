"""Collects Python's garbage on all ranks at the same steps.

Python collects reference cycles whenever enough objects exist, at another moment on each rank. A collection takes up to
hundreds of milliseconds in a process with many objects, and all ranks wait for the one that collects. Here automatic
collection is off during the training, and every rank collects after the same steps, while its device still computes.
Objects that exist after the first step stay for the whole run, so they are frozen, and later collections skip them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

EVERY = 100  # steps between two collections


class GarbageCollection:
    """Collects after every ``every`` steps within ``scheduled``."""

    def __init__(self, every: int = EVERY) -> None:
        self._every = every
        self._frozen = False

    @contextmanager
    def scheduled(self) -> Iterator[None]:
        """Disables automatic collection in this context, if the process has it enabled."""
        if not gc.isenabled():
            yield
            return
        gc.disable()
        try:
            yield
        finally:
            gc.enable()
            gc.unfreeze()

    def after(self, step: int) -> None:
        """Collects if ``step`` is due; called after each step with the number of steps of the run."""
        if gc.isenabled():
            return
        if not self._frozen:
            self._frozen = True
            gc.collect()
            gc.freeze()
        elif step % self._every == 0:
            gc.collect()
