"""Sends the files in ``metrics/`` of a run to a tracker, after the run or while it trains. ``sync`` uses it.

Of steps that were done twice, only the newest line is sent. A tracker continues where it stopped (see ``tracker.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import NewLines
from hpc_train.telemetry.sinks.background import BATCH
from hpc_train.telemetry.sinks.sink import Backend, Line
from hpc_train.telemetry.sinks.tracker import Position, Tracker


class NewMetrics:
    """Reads the lines of metrics that all attempts of a run have appended since the last ``read``."""

    def __init__(self, run: RunDirectory) -> None:
        self._folder = run.metrics
        self._files: dict[Path, NewLines] = {}

    def read(self) -> list[Line]:
        """Returns the new lines in the order of their steps, the newest one of each step."""
        found: dict[int, Line] = {}
        for path in sorted(self._folder.glob("attempt-*.jsonl"), key=_attempt):
            for line in self._files.setdefault(path, NewLines(path)).read():
                if isinstance(line, dict) and type(line.get("step")) is int:
                    found[line["step"]] = line
        return [found[step] for step in sorted(found)]


def _attempt(path: Path) -> int:
    return int(re.sub(r"\D", "", path.stem) or -1)


class Replay:
    """Sends one run to one tracker.

    Attributes:
        sent: the number of lines that were sent.
        last: the newest step that was read; 0 before the first.
    """

    def __init__(self, run: RunDirectory, backend: Backend) -> None:
        self.run = run
        self.backend = backend
        self.sent = 0
        self.last = 0
        self._metrics = NewMetrics(run)
        self._is_open = False

    def send_new(self, advance: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Sends the lines that were written since the last call.

        Args:
            advance: called with the numbers of lines sent and to send.

        Raises:
            UserError: the tracker cannot be reached, refuses the lines, or another process sends them.
        """
        lines = self._metrics.read()
        if not lines:
            return
        self.last = lines[-1]["step"]
        try:
            self._send(lines, advance)
        except BaseException as error:
            with suppress(Exception):
                self.backend.abandon()
            if isinstance(error, UserError | KeyboardInterrupt):
                raise
            raise UserError(
                f"{self.backend.label} did not accept the metrics of {self.run.path}: {type(error).__name__}: {error}",
                where=f"sync --to {self.backend.name}",
                fix="repeat the command when the tracker responds; it continues where it has stopped",
            ) from error

    def finish(self) -> None:
        """Ends the connection, if there was something to send."""
        if self._is_open:
            self.backend.finish()

    def _send(self, lines: list[Line], advance: Callable[[int, int], None]) -> None:
        lines = [line for line in lines if line["step"] > self._known()]
        if not lines:
            return
        if not self._is_open:
            self._is_open = self.backend.open()
        for first in range(0, len(lines), BATCH):
            self.backend.write(lines[first : first + BATCH])
            self.sent += len(lines[first : first + BATCH])
            advance(self.sent, len(lines))

    def _known(self) -> int:
        """Returns the step up to which lines need not be sent; 0 for a backend that replaces those of earlier steps."""
        if not isinstance(self.backend, Tracker):
            return 0
        if self._is_open:
            return 0 if self.backend.replaces else self.backend.position.step
        return Position.read(self.run, self.backend.name, self.backend.where).step
