"""Sends the metrics and texts of a run to a tracker from the files of its directory, after the run or while it trains.

If a step was repeated, only its newest line is sent. A tracker continues where it stopped (see ``tracker.py``).
A new tracker is a class and a line in ``BACKENDS``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import NewLines
from hpc_train.telemetry.sinks.mlflow import Mlflow
from hpc_train.telemetry.sinks.tensorboard import TensorBoard
from hpc_train.telemetry.sinks.tracker import Line, Position, Session, Tracker
from hpc_train.telemetry.sinks.wandb import Wandb

BATCH = 500  # most lines of one ``Tracker.write``


class NewOfAttempts:
    """Reads the lines that all attempts of a run have appended to the files of one folder since the last ``read``."""

    def __init__(self, run: RunDirectory, folder: Path) -> None:
        self._run = run
        self._folder = folder
        self._files: dict[Path, NewLines] = {}

    def read(self) -> list[Line]:
        """Returns the new lines in the order of the attempts."""
        paths = sorted(self._folder.glob("attempt-*.jsonl"), key=lambda path: int(re.sub(r"\D", "", path.stem) or -1))
        new = (line for path in paths for line in self._files.setdefault(path, self._run.follow(path)).read())
        return list(new)


class Replay:
    """Sends one run to one tracker.

    Attributes:
        sent: the number of lines that were sent.
        last: the newest step that was read; 0 before the first.
    """

    def __init__(self, run: RunDirectory, backend: Tracker) -> None:
        self.run = run
        self.backend = backend
        self.sent = 0
        self.last = 0
        self._metrics = NewOfAttempts(run, run.metrics)
        self._texts = NewOfAttempts(run, run.texts)
        self._read_texts: list[Line] = []
        self._sent_texts: int | None = None
        self.is_open = False
        self.is_wanted = True

    def send_new(self, advance: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Sends what was written since the last call.

        Args:
            advance: called with the numbers of lines sent and to send.

        Raises:
            UserError: the tracker cannot be reached, or another process sends the metrics.
            Exception: the exception of the tracker's client. The tracker is abandoned.
        """
        try:
            newest = {line["step"]: line for line in self._metrics.read()}
            lines = [newest[step] for step in sorted(newest)]
            if lines:
                self.last = lines[-1]["step"]
                self._send(lines, advance)
            self._send_texts()
        except BaseException:
            with suppress(Exception):
                self.backend.abandon()
            raise

    def finish(self) -> None:
        """Ends the connection, if there was something to send."""
        if self.is_open:
            self.backend.finish()

    def _send(self, lines: list[Line], advance: Callable[[int, int], None]) -> None:
        # a tracker that replaces earlier values gets all lines
        known = 0 if self.is_open and self.backend.replaces else self._position.step
        lines = [line for line in lines if line["step"] > known]
        if not lines or not self._opened():
            return
        for first in range(0, len(lines), BATCH):
            batch = lines[first : first + BATCH]
            self.backend.write(batch)
            self.sent += len(batch)
            advance(first + len(batch), len(lines))

    def _send_texts(self) -> None:
        """Sends the new texts up to the last step of the metrics; a tracker takes the newest step for the last line."""
        self._read_texts += self._texts.read()
        if not self._read_texts:
            return
        if self._sent_texts is None:
            self._sent_texts = self._position.texts
        due = list(takewhile(lambda text: text["step"] <= self.last, self._read_texts))[self._sent_texts :]
        if due and self._opened():
            self.backend.write_texts(due)
            self._sent_texts += len(due)

    def _opened(self) -> bool:
        if not self.is_open and self.is_wanted:
            self.is_open = self.is_wanted = self.backend.open()
        return self.is_open

    @property
    def _position(self) -> Position:
        tracker = self.backend
        if self.is_open:
            return tracker.position
        return Position.read(tracker.directory, tracker.name, tracker.where)


# whether or not the config requests them
BACKENDS: dict[str, Callable[[Session], Tracker]] = {
    Wandb.name: Wandb,
    Mlflow.name: Mlflow,
    TensorBoard.name: TensorBoard,
}
