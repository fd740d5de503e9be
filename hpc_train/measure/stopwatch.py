"""Stretches of time added up: by the host's clock, or on a GPU's own time line without making the host wait."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Protocol

import torch


class Stopwatch(Protocol):
    """Adds up the stretches between ``begin`` and ``end``.

    Attributes:
        stretches: how many there were since the start.
    """

    stretches: int

    def begin(self) -> Any:
        """What ``end`` wants."""

    def end(self, begun: Any) -> None: ...

    def settle(self) -> None:
        """Now and then: adds up what is known by now. Does not wait."""

    def take(self) -> float:
        """Seconds since the last ``take``. Waits for the device where a stretch has not ended there."""


def make_stopwatch(device: torch.device) -> Stopwatch:
    return DeviceStopwatch() if device.type == "cuda" else HostStopwatch()


class HostStopwatch:
    """A ``Stopwatch`` for the CPU, where what is waited for stops the host."""

    def __init__(self) -> None:
        self.stretches = 0
        self._seconds = 0.0

    def begin(self) -> float:
        return time.perf_counter()

    def end(self, begun: float) -> None:
        self._seconds += time.perf_counter() - begun
        self.stretches += 1

    def settle(self) -> None:
        pass

    def take(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class DeviceStopwatch:
    """A ``Stopwatch`` by events in the current stream. They are used again once they have passed."""

    def __init__(self) -> None:
        self.stretches = 0
        self._seconds = 0.0
        self._free: list[torch.cuda.Event] = []
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def begin(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end(self, begun: torch.cuda.Event) -> None:
        self._open.append((begun, self.begin()))
        self.stretches += 1

    def settle(self) -> None:
        while self._open and self._open[0][1].query():
            first, last = self._open.popleft()
            self._seconds += first.elapsed_time(last) * 1e-3
            self._free += (first, last)

    def take(self) -> float:
        if self._open:
            self._open[-1][1].synchronize()
        self.settle()
        seconds, self._seconds = self._seconds, 0.0
        return seconds
