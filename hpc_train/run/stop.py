"""The flag that a signal sets and nothing else does: no work is done inside a signal handler."""

from __future__ import annotations

import time


class StopFlag:
    """Says whether this process was asked to stop, and why. Written by a signal handler, read once per step."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.since = 0.0  # time.monotonic() of the first request

    @property
    def requested(self) -> bool:
        return self.reason is not None

    def request(self, reason: str) -> None:
        """The first reason stays."""
        if self.reason is None:
            self.reason, self.since = reason, time.monotonic()
