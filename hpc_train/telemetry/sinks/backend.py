"""Defines the client of a tracker, which receives the metrics and texts of a run from the files in its directory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

Line = dict[str, Any]
HEAD = ("step", "time", "attempt")  # keys that identify a line and are not plotted


class Backend:
    """The client of one tracker. One thread makes all calls, and each of them may block or raise any exception.

    Attributes:
        name: its key in ``telemetry`` and in ``run.json``.
        label: its name in messages.
    """

    name: ClassVar[str]
    label: ClassVar[str]

    def open(self) -> bool:
        """Connects, when there is a first line. Returns whether lines are wanted."""
        raise NotImplementedError

    def write(self, lines: Sequence[Line]) -> None:
        """Sends all lines that wait, at least one."""
        raise NotImplementedError

    def write_texts(self, texts: Sequence[Line]) -> None:
        """Sends texts of hooks (step, name, text). A backend that has no place for text ignores them."""

    def finish(self) -> None:
        """Sends what is buffered and disconnects. It is not called after an error."""

    def abandon(self) -> None:
        """Frees what it holds on to, such as a lock, after an error."""

    def outcome(self) -> dict[str, Any]:
        """Returns what ``run.json`` records about it, such as the URL of the run."""
        return {}
