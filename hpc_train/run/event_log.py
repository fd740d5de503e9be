"""Writes the event log of a run, which has one file per writing process and attempt.

No two processes share a file, because two clients of a network file system that append to one file lose lines.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpc_train.run.clock import Clock
from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import Event, misfit
from hpc_train.run.exits import Failure, classify_message
from hpc_train.run.file_writer import FileWriter, Outage

STRICT = "HPC_TRAIN_STRICT_EVENTS"  # for development: an event that is not as its row says raises an error


def _writer() -> FileWriter:
    return FileWriter("the event log")


@dataclass(frozen=True)
class EventLog:
    """Appends events of one writer (``submitter``, ``agent-<node>``, ``rank-0003``) in one attempt.

    A thread writes them (``FileWriter``): lines that cannot be written stay in memory until they can.
    """

    path: Path
    attempt: int
    rank: int | None = None
    writer: FileWriter = field(default_factory=_writer, compare=False, repr=False)
    hear: Callable[[Event], object] | None = field(default=None, compare=False, repr=False)
    clock: Clock = field(default_factory=Clock.inherited, compare=False)

    def __post_init__(self) -> None:
        self.writer.on_outage = self.write_outage

    @classmethod
    def open(
        cls, run: RunDirectory, writer: str, attempt: int, rank: int | None = None, clock: Clock | None = None
    ) -> EventLog:
        return cls(run.events_file(writer, attempt), attempt, rank, clock=clock or Clock.inherited())

    def write_outage(self, outage: Outage) -> None:
        """Appends an event about a time in which files of the run directory could not be written. Does not wait."""
        message = f"files of the run directory could not be written for {outage.seconds:.0f} s: {outage.failure}"
        kind = classify_message(outage.failure) or Failure.FILE_SYSTEM
        times = {"began": self.now() - outage.seconds, "seconds": round(outage.seconds, 3)}
        self._append("file_system_failed", None, times | {"class": kind, "message": message}, wait=False)

    def now(self) -> float:
        """Returns the time by the clock of the job, in seconds since 1970."""
        return self.clock.now()

    def of(self, attempt: int) -> EventLog:
        """Returns the log of the same process in another attempt; both share the pending lines."""
        writer = self.path.name.rpartition("-")[0]
        return replace(self, path=self.path.with_name(f"{writer}-{attempt:03d}.jsonl"), attempt=attempt)

    def heard_by(self, hear: Callable[[Event], object]) -> EventLog:
        """Returns the log of the same process that also calls ``hear`` with each event, after it was written."""
        return replace(self, hear=hear)

    def close(self) -> None:
        """Waits a few seconds for what is pending, if the file system does not respond."""
        self.writer.close()

    def record(self, run: RunDirectory, **fields: Any) -> None:
        """Merges ``fields`` into ``run.json`` as ``update_record`` does. A failing file system does not raise."""
        self.writer.put(run.path / "run.json", lambda again: run.update_record(**fields))

    def write(self, event: str, *, step: int | None = None, **details: Any) -> None:
        """Appends an event with time, node, rank, attempt and step. A failing file system does not raise."""
        self._append(event, step, details, wait=True)

    def _append(self, event: str, step: int | None, details: dict[str, Any], wait: bool) -> None:
        head = {"time": self.now(), "event": event, "rank": self.rank, "node": socket.gethostname()}
        event_line = Event(head | {"attempt": self.attempt, "step": step} | details)
        if STRICT in os.environ:
            problem = misfit(json.loads(json.dumps(event_line)))
            assert problem is None, problem
        self.writer.append(self.path, event_line, wait)
        if self.hear is not None:
            self.hear(event_line)
