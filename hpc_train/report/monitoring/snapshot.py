"""Reads from the run directory what a run shows to the monitoring of a site.

All values are derived from the files of the run, as the time ledger is, so that the counters and the series continue
when the workers or the job start again. Reading costs the workers nothing: the agent of node 0 does it.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

from hpc_train.report.monitoring.names import ACCOUNTS, FABRIC_PARTS, METRICS, STATES
from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import EVENTS, Event
from hpc_train.run.files import NewLines
from hpc_train.run.ledger import read_ledger
from hpc_train.run.rows import Line
from hpc_train.version import __version__

Samples = dict[tuple[str, ...], float]

WORKING = ("starting", "training", "evaluating", "restarting")
FAILURES = "failures"  # the counter that has the class of the failure as a label
COUNTERS = {kind.counter for kind in EVENTS.values() if kind.counter} - {FAILURES}
STALL_MIN_S = 300.0  # without progress while it trains
STALL_OTHER_MIN_S = 1800.0  # likewise while it starts or evaluates
STALL_FACTOR = 10  # or this many times the longest recent time between two lines of metrics
RECENT_LINES = 20
LEDGER_EVERY_S = 60.0
LEDGER_COST = 50  # and at least this many times as long as it took to read it


@dataclass(frozen=True)
class Identity:
    """Identifies a run to the monitoring.

    Attributes:
        labels: the values of ``RUN_LABELS``, in their order.
        job_id, partition: empty outside of Slurm.
        node: that of the agent which reports.
    """

    labels: Mapping[str, str]
    job_id: str = ""
    partition: str = ""
    node: str = ""


@dataclass(frozen=True)
class Snapshot:
    """The values of all known metrics at one time: name -> values of the metric's own labels -> value."""

    labels: Mapping[str, str]
    samples: Mapping[str, Samples]


@dataclass
class RunReader:
    """Reads what was appended to a run directory since the last ``read``."""

    run: RunDirectory
    identity: Identity
    _files: dict[Path, NewLines] = field(default_factory=dict, init=False)
    _line: dict[str, Any] = field(default_factory=dict, init=False)  # the newest value of each key
    _line_times: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_LINES), init=False)
    _counts: Counter[str] = field(default_factory=Counter, init=False)
    _failures: Counter[str] = field(default_factory=Counter, init=False)
    _events: dict[str, Event] = field(default_factory=dict, init=False)  # the newest of each name
    _failed_saves: int = field(default=0, init=False)  # since the last one that succeeded
    _state: str = field(default="starting", init=False)
    _state_since: float = field(default=0.0, init=False)
    _progress: float = field(default=0.0, init=False)
    _ledger: dict[str, Samples] = field(default_factory=dict, init=False)
    _ledger_due: float = field(default=float("-inf"), init=False)

    def read(self, now: float | None = None) -> Snapshot:
        """Returns the current values.

        Args:
            now: seconds since 1970; the current time by default.
        """
        now = time.time() if now is None else now
        for event in sorted(self._new(self.run.events, "*.jsonl"), key=attrgetter("time")):
            self._add_event(event)
        for line in sorted(self._new(self.run.metrics, "attempt-*.jsonl"), key=attrgetter("time")):
            self._add_line(line)
        samples: dict[str, Samples] = {
            name: {(): float(value)} for name, value in self._single(now).items() if value is not None
        }
        return Snapshot(self.identity.labels, samples | self._labeled() | self._read_ledger(now))

    def _new(self, folder: Path, pattern: str) -> Iterator[Any]:
        """Yields the new lines of all files in ``folder`` that have the time that all whole lines have."""
        for path in sorted(folder.glob(pattern)):
            lines = self._files.setdefault(path, self.run.follow(path))
            yield from (line for line in lines.read() if "time" in line)

    def _add_event(self, event: Event) -> None:
        name, kind = event.name, event.kind
        self._events[name] = event
        self._counts[kind.counter] += 1
        if kind.counter == FAILURES:
            self._failures[str(event.failure)] += 1
        if name == "step_skipped":
            self._counts["skipped_steps"] += event.get("steps", 1)
        elif name == "checkpoint_saved":
            self._failed_saves = 0
        elif name == "checkpoint_failed":
            self._failed_saves += 1
        elif name == "started":
            self._line_times.clear()
        if kind.state and not (name == "stopped" and self._state == "requeued"):
            self._state = kind.state
            self._state_since = event.time
        if kind.is_progress:
            self._progress = max(self._progress, event.time)

    def _add_line(self, line: Line) -> None:
        self._line |= {key: value for key, value in line.items() if isinstance(value, int | float)}
        self._line_times.append(line.time)
        self._progress = max(self._progress, line.time)
        if line.time > self._state_since and self._state in WORKING:
            self._state = "training"
            self._state_since = line.time

    def _single(self, now: float) -> dict[str, float | None]:
        """Returns the values of the metrics without own labels."""
        started, saved = self._events.get("started", Event()), self._events.get("checkpoint_saved", Event())
        from_lines = {metric.name: self._line.get(metric.key) for metric in METRICS if metric.key is not None}
        return {
            **from_lines,
            "stalled": self._is_stalled(now),
            "last_progress_timestamp_seconds": self._progress or None,
            "attempt": started.get("attempt"),
            "nodes": len(started["nodes"]) if "nodes" in started else None,
            "allocated_gpus": started.get("gpus"),
            "planned_steps": self.run.record().get("total_steps"),
            **{name: self._counts[name] for name in {*COUNTERS, "skipped_steps"}},
            "checkpoint_failures_in_a_row": self._failed_saves,
            "last_checkpoint_step": saved.get("step"),
            "last_checkpoint_timestamp_seconds": saved.get("time"),
            "last_checkpoint_bytes": saved.get("bytes"),
            "last_checkpoint_duration_seconds": saved.get("seconds"),
        }

    def _labeled(self) -> dict[str, Samples]:
        who = self.identity
        step_s = self._line.get("step_s") or 0.0
        found: dict[str, Samples] = {
            "run_info": {(who.job_id, who.partition, who.node, __version__): 1.0},
            "run_state": {(state,): float(state == self._state) for state in STATES},
            "failures": {
                (name,): float(self._failures[name])
                for metric in METRICS
                if metric.name == "failures"
                for name in metric.choices
            },
            "preflight_bandwidth_bytes_per_second": self._preflight(),
        }
        for name, way in (("transmit", "tx"), ("receive", "rx")):
            per_step = {network: self._line.get(f"{network}_{way}_bytes") for network in ("rdma", "net")}
            found[f"network_{name}_bytes_per_second"] = {
                (network,): value / step_s for network, value in per_step.items() if value is not None and step_s
            }
        return found

    def _preflight(self) -> Samples:
        measured = self._events.get("preflight", Event()).get("bus_gb_per_s") or {}
        parts = (measured.get("nodes", {}).values(), measured.get("rails", ()), (measured.get("world"),))
        slowest = {
            part: min(rates)
            for part, found in zip(FABRIC_PARTS, parts, strict=True)
            if (rates := [rate for rate in found if rate is not None])
        }
        return {(part,): 1e9 * rate for part, rate in slowest.items()}

    def _is_stalled(self, now: float) -> bool:
        if self._state not in WORKING or not self._progress:
            return False
        times = list(self._line_times)
        usual = max((later - earlier for earlier, later in pairwise(times)), default=0.0)
        least = STALL_MIN_S if self._state == "training" else STALL_OTHER_MIN_S
        return now - self._progress > max(least, STALL_FACTOR * usual)

    def _read_ledger(self, now: float) -> dict[str, Samples]:
        """Returns what the time ledger says; it is read rarely, because it reads the whole run."""
        began = time.monotonic()
        is_over = self._state not in WORKING
        if began < self._ledger_due and not is_over:
            return self._ledger
        total = read_ledger(self.run, now=None if is_over else now).total
        self._ledger = {
            "goodput_ratio": {(): total.useful_share},
            "time_seconds": {(use,): getattr(total, f"{use}_s") for use in ACCOUNTS},
            "gpu_seconds": {(): total.gpu_s},
        }
        cost = time.monotonic() - began
        self._ledger_due = began + cost + max(LEDGER_EVERY_S, LEDGER_COST * cost)
        return self._ledger
