"""Writes the event log of a run, which has one file per writing process and attempt, by the clock of the job.

No two processes share a file, because two clients of a network file system that append to one file lose lines.

A time is the wall-clock time at the start of the job's first agent plus the seconds that have passed since then. A
clock of another node that is wrong, or a clock that is set meanwhile, therefore does not distort the time ledger. The
processes of a node share the count of seconds since its boot; the agents of other nodes receive the clock with their
first order.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import Event, misfit
from hpc_train.run.exits import Failure, classify_message
from hpc_train.run.file_writer import FileWriter, Outage
from hpc_train.run.processes import boot_id

CLOCK = "HPC_TRAIN_CLOCK"  # in the environment of workers: the boot id of their node, and the offset


@dataclass(frozen=True)
class Clock:
    """Tells the time in seconds since 1970. Without an ``offset`` it is the wall clock.

    Attributes:
        offset: the time minus the seconds since the boot of this node.
    """

    offset: float | None = None

    @classmethod
    def at(cls, now: float) -> Clock:
        """Returns a clock that shows ``now`` at this moment."""
        return cls(now - _since_boot())

    @classmethod
    def inherited(cls, environment: Mapping[str, str] = os.environ) -> Clock:
        """Returns the clock of the job whose agent has started this process; elsewhere the wall clock."""
        boot, _, offset = environment.get(CLOCK, "").partition(" ")
        return cls(float(offset)) if offset and boot == boot_id() else cls()

    def now(self) -> float:
        return time.time() if self.offset is None else self.offset + _since_boot()

    def of_wall(self, then: float) -> float:
        """Returns the time of this clock at the wall-clock time ``then``, if that clock has not been set since."""
        return then if self.offset is None else then + self.now() - time.time()

    def environment(self) -> dict[str, str]:
        """Returns the variable from which ``inherited`` returns this clock."""
        return {} if self.offset is None else {CLOCK: f"{boot_id()} {self.offset!r}"}


def age_of_this_process() -> float:
    """Returns the seconds since this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # since boot
    return _since_boot() - ticks / os.sysconf("SC_CLK_TCK")


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


STRICT = "HPC_TRAIN_STRICT_EVENTS"  # for development: an event that does not match its row in the table raises an error


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
        """Waits for pending lines, but only a few seconds if the file system does not respond."""
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
