"""Defines what receives the metrics of a run besides the files in ``metrics/``.

A ``Sink`` is called from the training loop. A ``Backend`` is the client of one tracker and may block or raise;
``background.BackgroundSink`` makes a sink of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

Line = dict[str, Any]
HEAD = ("step", "time", "attempt")  # keys that identify a line and are not plotted


class Sink(Protocol):
    """Receives every line of metrics, on rank 0 only. No method raises; only ``close`` waits, in bounded time."""

    def log(self, line: Line) -> None:
        """Logs one line of metrics, whose numbers are finite or None (see ``metrics.MetricsLog``)."""

    def text(self, step: int, name: str, text: str) -> None:
        """Logs text of a hook."""

    def end(self) -> None:
        """Tells that no line follows, so that several sinks can finish at the same time."""

    def close(self) -> None:
        """Waits until everything is sent, or until its time is over."""


class Backend:
    """Calls the client of one tracker. One thread makes all calls, and each of them may block or raise any exception.

    Attributes:
        name: its key in ``telemetry`` and in ``run.json``.
        label: its name in messages.
        finish_s: seconds that ``close`` waits for the remaining lines and ``finish``.
    """

    name: ClassVar[str]
    label: ClassVar[str]
    finish_s: float = 30.0

    def open(self) -> bool:
        """Connects, when there is a first line. Returns whether lines are wanted."""
        raise NotImplementedError

    def write(self, lines: Sequence[Line]) -> None:
        """Sends all lines that wait, at least one."""
        raise NotImplementedError

    def text(self, step: int, name: str, text: str) -> None:
        """Sends text of a hook. A backend that has no place for text ignores it."""

    def finish(self) -> None:
        """Sends what is buffered and disconnects. It is not called after an error."""

    def abandon(self) -> None:
        """Frees what it holds on to, such as a lock, after an error."""

    def outcome(self) -> dict[str, Any]:
        """Returns what ``run.json`` records about it, such as the URL of the run."""
        return {}
