"""Reads a run once for all sections of its page."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

from hpc_train.config.secrets import ASSIGNMENT, SECRET_NAME, SHORTEST
from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import Event
from hpc_train.run.ledger import Attempt, Ledger, account_for, attempts_of, newest_checkpoint_step, read_frozen
from hpc_train.run.rows import Line
from hpc_train.runs.diagnosis import Diagnosis, diagnose
from hpc_train.runs.job_status import JobStatuses
from hpc_train.runs.lookup import RunHandle, statuses_of
from hpc_train.schedulers.scheduler import JobStatus


@dataclass(frozen=True)
class _ReadOnce(RunDirectory):
    """Reads the events and metrics of a run directory only once, which takes a while for a long run."""

    @cached_property
    def _events_read(self) -> list[Event]:
        return super().read_events()

    @cached_property
    def _lines_read(self) -> list[Line]:
        return list(super().read_all_metrics())

    def read_events(self) -> list[Event]:
        return list(self._events_read)

    def read_all_metrics(self) -> Iterator[Line]:
        yield from self._lines_read


@dataclass(frozen=True)
class RunFacts:
    """Holds the data that the page shows about a run. ``lines`` are the metrics of all attempts in the order of their
    times, including those of repeated steps."""

    handle: RunHandle
    diagnosis: Diagnosis
    record: Mapping[str, Any]
    events: Sequence[Event]
    lines: Sequence[Line]
    attempts: Sequence[Attempt]
    ledger: Ledger
    _values: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    @classmethod
    def read(cls, handle: RunHandle, statuses: dict[str, JobStatus] | None = None) -> RunFacts:
        """Reads the run; ``statuses`` are the states of Slurm jobs, None asks Slurm."""
        handle = replace(handle, run=_ReadOnce(handle.run.path))
        asks_slurm = statuses is None
        if statuses is None:
            statuses = statuses_of([handle], JobStatuses())
        over = handle.view(statuses).exit is not None
        events = handle.run.read_events()
        intact = (line for line in handle.run.read_all_metrics() if "time" in line and "attempt" in line)
        lines = sorted(intact, key=attrgetter("time"))
        record = handle.run.record()
        attempts = attempts_of(events, lines, read_frozen(handle.run))
        submitted = [entry["time"] for entry in record.get("submissions", []) if "time" in entry]
        ledger = account_for(attempts, submitted, None if over else time.time())
        diagnosis = diagnose(handle, statuses, asks_slurm=asks_slurm, spent=ledger.total)
        return cls(handle, diagnosis, record, events, lines, attempts, ledger)

    @property
    def config(self) -> Mapping[str, Any]:
        return self.handle.plain_config

    @property
    def is_command(self) -> bool:
        return self.record.get("own_code") == "command"

    @cached_property
    def kept(self) -> list[Line]:
        """Returns the logged steps that count, in order; a repeated step has only its last line."""
        return [line for line, lost in zip(self.lines, self.lost, strict=True) if not lost]

    @cached_property
    def lost(self) -> list[bool]:
        """Returns for each of ``lines`` whether its work was repeated, or has to be."""
        begins = [(stretch.time, stretch.step) for attempt in self.attempts for stretch in attempt.stretches]
        if self.diagnosis.exit_code is not None and not (self.attempts and self.attempts[-1].closed):
            begins.append((float("inf"), newest_checkpoint_step(self.events)))
        lost = [False] * len(self.lines)
        least = float("inf")
        upcoming = sorted(begins)
        for index in reversed(range(len(self.lines))):
            line = self.lines[index]
            while upcoming and upcoming[-1][0] > line.time:
                least = min(least, upcoming.pop()[1])
            lost[index] = line.step > least
        return lost

    @cached_property
    def newest_attempt(self) -> Mapping[str, Any]:
        """Returns the record of the newest attempt, with its layout; empty if the run has not started."""
        with suppress(OSError):
            return self.handle.run.attempt_record(self.handle.run.newest_attempt())
        return {}

    def of_event(self, *names: str) -> list[Event]:
        return [event for event in self.events if event.name in names]

    @property
    def shown(self) -> Sequence[Line]:
        """Returns the lines whose rates and shares are shown: those that count, or all if every step was lost."""
        return self.kept or self.lines

    @cached_property
    def _steps(self) -> list[int]:
        return [line.step for line in self.shown]

    def values(self, key: str) -> list[tuple[float, float]]:
        """Returns (step, value) of the metric in the lines that are shown."""
        if key not in self._values:
            pairs: Iterator[tuple[int, Any]] = zip(self._steps, (line.get(key) for line in self.shown), strict=True)
            self._values[key] = [pair for pair in pairs if isinstance(pair[1], int | float)]
        return self._values[key]


def secrets_of(handle: RunHandle) -> Iterator[str]:
    """Yields the values of the frozen config that may be secrets (see ``config.secrets``), long ones first.

    A traceback or the output of a program may repeat them. Directories above the run directory do not count as secrets.
    """
    cluster = handle.plain_config.get("cluster") or {}
    values = {str(value) for value in (cluster.get("env") or {}).values()}
    for key in ("setup", "teardown"):
        for line in cluster.get(key) or []:
            values |= {value.strip("'\"") for name, value in ASSIGNMENT.findall(str(line)) if SECRET_NAME.search(name)}
    hidden = {value for value in values if len(value) >= SHORTEST and not handle.run.path.is_relative_to(value)}
    yield from sorted(hidden, key=len, reverse=True)
