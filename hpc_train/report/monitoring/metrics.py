"""Defines the metrics that a run exports to the monitoring of a site, and computes their values.

    python -m hpc_train.report.monitoring.metrics    prints the table in Markdown, as in docs/howto/monitoring.md

Units are base units (seconds, bytes, shares from 0 to 1), as Prometheus recommends. All labels have few values: there
is no label for a rank or a step, so that the number of series does not grow with a run.

All values are derived from the files of the run, as the time ledger is, so that the counters and the series continue
when the workers or the job start again. Reading costs the workers nothing: the agent of node 0 does it.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import EVENTS, Event
from hpc_train.run.exits import Failure
from hpc_train.run.files import NewLines
from hpc_train.run.ledger import Account, read_ledger
from hpc_train.run.rows import Line
from hpc_train.version import __version__

PREFIX = "hpc_train_"
GAUGE, COUNTER = "gauge", "counter"
RUN_LABELS = {  # the labels of every metric
    "run": "the name of the run; SWEEP/NUMBER in a sweep",
    "run_id": "the id of the run, which stays the same in all jobs and attempts",
    "user": "the user who started the run",
}
INFO_LABELS = ("job_id", "partition", "node", "version")

STATES = ("starting", "training", "evaluating", "restarting", "requeued", "finished", "stopped", "failed")
ACCOUNTS = tuple(
    field.name.removesuffix("_s")
    for field in fields(Account)
    if field.name not in ("gpu_s", "rank_s", "corrupted_steps")
)
FABRIC_PARTS = ("node", "rail", "world")
FAILURE_CLASSES = tuple(map(str, Failure))


@dataclass(frozen=True)
class Metric:
    """Holds a row of the table.

    Attributes:
        name: the name without ``PREFIX``; a counter is shown with the suffix ``_total``.
        unit: empty for numbers without a unit.
        key: the key of a line of metrics (``metrics/attempt-NNN.jsonl``) with its value; None if it has another source.
        labels: the labels in addition to ``RUN_LABELS``.
        choices: the values of the only label in ``labels``; empty if they are not known in advance.
    """

    name: str
    meaning: str
    unit: str = ""
    kind: str = GAUGE
    key: str | None = None
    labels: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """Returns the name to use in a query."""
        name = PREFIX + self.name
        return f"{name}_total" if self.kind == COUNTER else name


METRICS = (
    # the run
    Metric("run_info", "Always 1; its labels describe the current job of the run.", labels=INFO_LABELS),
    Metric("run_state", "1 for the state of the run, 0 for the others.", labels=("state",), choices=STATES),
    Metric("stalled", "1 if the run has made no progress for much longer than usual, else 0."),
    Metric("last_progress_timestamp_seconds", "When the run last made progress, since 1970.", "seconds"),
    Metric("attempt", "The number of the current start of the workers; the first is 0."),
    Metric("ranks", "The number of ranks.", key="world_size"),
    Metric("nodes", "The number of nodes that train."),
    Metric("allocated_gpus", "The number of GPUs that the job holds."),
    # training
    Metric("step", "The completed optimizer steps; it decreases when steps are repeated.", key="step"),
    Metric("planned_steps", "The steps at the end of training."),
    Metric("epoch", "The epoch.", key="epoch"),
    Metric("loss", "The training loss.", key="loss"),
    Metric("validation_loss", "The loss of the newest evaluation.", key="val_loss"),
    Metric("validation_accuracy_ratio", "The accuracy of the newest evaluation.", "ratio", key="val_accuracy"),
    Metric("learning_rate", "The learning rate.", key="lr"),
    Metric("gradient_norm", "The norm of the gradient before clipping.", key="grad_norm"),
    Metric("loss_scale", "The loss scale of fp16.", key="loss_scale"),
    Metric("samples", "The samples since step 0.", key="samples"),
    Metric("tokens", "The targets since step 0 that count in the loss.", key="tokens"),
    Metric("skipped_steps", "The steps skipped because their gradients were not finite.", kind=COUNTER),
    Metric("rollbacks", "The rollbacks to an earlier checkpoint because training diverged.", kind=COUNTER),
    # speed
    Metric("step_duration_seconds", "The time per step.", "seconds", key="step_s"),
    Metric("tokens_per_second", "The targets per second.", "1/second", key="tokens_per_s"),
    Metric("samples_per_second", "The samples per second.", "1/second", key="samples_per_s"),
    Metric("model_flops_utilization_ratio", "The MFU.", "ratio", key="mfu"),
    Metric("hardware_flops_utilization_ratio", "The HFU, which counts recomputation.", "ratio", key="hfu"),
    Metric("gpu_utilization_ratio", "The share of the time in which the GPUs ran a kernel.", "ratio", key="gpu_util"),
    Metric("data_wait_ratio", "The share of the time spent waiting for data.", "ratio", key="data_wait_share"),
    Metric("host_ratio", "The share of the time in which the GPUs waited for the host.", "ratio", key="host_share"),
    Metric("communication_ratio", "The share of the time spent in communication.", "ratio", key="comm_share"),
    Metric("pipeline_bubble_ratio", "The share of the time spent in pipeline bubbles.", "ratio", key="bubble_share"),
    Metric("peak_memory_bytes", "The largest peak memory of a rank.", "bytes", key="peak_memory_bytes"),
    Metric("memory_imbalance_ratio", "The largest peak memory over the mean.", "ratio", key="memory_imbalance"),
    # goodput
    Metric("goodput_ratio", "The share of the allocated time in steps and evaluations that were kept.", "ratio"),
    Metric(
        "time_seconds",
        "The time of all jobs of the run by its use. Lost work moves from steps to lost, or to corrupted.", "seconds",
        labels=("use",), choices=ACCOUNTS,
    ),
    Metric("gpu_seconds", "The GPU time of all jobs of the run.", "seconds"),
    # failures
    Metric("restarts", "The restarts of the workers within a job.", kind=COUNTER),
    Metric("requeues", "The requeues of the job.", kind=COUNTER),
    Metric(
        "failures", "The failures of workers and nodes by class.", kind=COUNTER,
        labels=("class",), choices=FAILURE_CLASSES,
    ),
    # checkpoints
    Metric("checkpoint_saves", "The checkpoints saved.", kind=COUNTER),
    Metric("checkpoint_failures", "The saves that failed.", kind=COUNTER),
    Metric("checkpoint_failures_in_a_row", "The saves that failed since the last one that succeeded."),
    Metric("last_checkpoint_step", "The step of the newest checkpoint."),
    Metric("last_checkpoint_timestamp_seconds", "When the newest checkpoint was saved, since 1970.", "seconds"),
    Metric("last_checkpoint_bytes", "The size of the newest checkpoint.", "bytes"),
    Metric("last_checkpoint_duration_seconds", "The time to write the newest checkpoint.", "seconds"),
    # fabric
    Metric(
        "network_transmit_bytes_per_second", "The bytes that all nodes send.", "bytes/second",
        labels=("network",), choices=("rdma", "net"),
    ),
    Metric(
        "network_receive_bytes_per_second", "The bytes that all nodes receive.", "bytes/second",
        labels=("network",), choices=("rdma", "net"),
    ),
    Metric("compute_imbalance_ratio", "The longest computation of a rank over the mean.", key="compute_imbalance"),
    Metric(
        "arrival_skew_seconds", "The time per step between the first and the last rank at collectives.", "seconds",
        key="arrival_skew_s",
    ),
    Metric(
        "preflight_bandwidth_bytes_per_second",
        "The bus bandwidth that the preflight measured: of the slowest node, of the slowest rail, and of all ranks.",
        "bytes/second", labels=("part",), choices=FABRIC_PARTS,
    ),
    Metric("stragglers", "The ranks for which the others waited.", kind=COUNTER),
    Metric("slow_nodes", "The nodes and GPUs that the preflight found slow.", kind=COUNTER),
    Metric("corruptions", "The suspects that train.verify has found because numbers were wrong.", kind=COUNTER),
    Metric("corrupted_steps", "The steps that are repeated because of wrong numbers."),
)  # fmt: skip


def table() -> str:
    """Returns the metrics as a table in Markdown."""
    rows = ["| Metric | Type | Unit | Own labels | Meaning |", "|---|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        if metric.choices and metric.name != "failures":  # troubleshooting.md lists the classes
            labels += f": {', '.join(metric.choices)}"
        rows.append(f"| `{metric.shown}` | {metric.kind} | {metric.unit} | {labels} | {metric.meaning} |")
    return "\n".join(rows)


Samples = dict[tuple[str, ...], float]

WORKING = ("starting", "training", "evaluating", "restarting")
FAILURES = "failures"  # the counter that has the class of the failure as a label
COUNTERS = {kind.counter for kind in EVENTS.values() if kind.counter} - {FAILURES}
STALL_MIN_S = 300.0  # time without progress while the run trains
STALL_OTHER_MIN_S = 1800.0  # time without progress while the run starts or evaluates
STALL_FACTOR = 10  # or this many times the longest recent time between two lines of metrics
RECENT_LINES = 20
LEDGER_EVERY_S = 60.0
LEDGER_COST = 50  # the pause is also at least this many times as long as reading the ledger took


@dataclass(frozen=True)
class Identity:
    """Identifies a run to the monitoring.

    Attributes:
        labels: the values of ``RUN_LABELS``, in their order.
        job_id, partition: empty outside of Slurm.
        node: the node of the agent that reports.
    """

    labels: Mapping[str, str]
    job_id: str = ""
    partition: str = ""
    node: str = ""


@dataclass(frozen=True)
class Snapshot:
    """Holds the values of all known metrics at one time: name -> values of the metric's own labels -> value."""

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
    _events: dict[str, Event] = field(default_factory=dict, init=False)  # the newest event of each name
    _failed_saves: int = field(default=0, init=False)  # failures since the last save that succeeded
    _state: str = field(default="starting", init=False)
    _state_since: float = field(default=0.0, init=False)
    _progress: float = field(default=0.0, init=False)
    _ledger: dict[str, Samples] = field(default_factory=dict, init=False)
    _ledger_due: float = field(default=float("-inf"), init=False)

    def read(self, now: float | None = None) -> Snapshot:
        """Returns the current values. ``now`` is in seconds since 1970, by default the current time."""
        if now is None:
            now = time.time()
        for event in sorted(self._new(self.run.events, "*.jsonl"), key=attrgetter("time")):
            self._add_event(event)
        for line in sorted(self._new(self.run.metrics, "attempt-*.jsonl"), key=attrgetter("time")):
            self._add_line(line)
        samples: dict[str, Samples] = {
            name: {(): float(value)} for name, value in self._single(now).items() if value is not None
        }
        return Snapshot(self.identity.labels, samples | self._labeled() | self._read_ledger(now))

    def _new(self, folder: Path, pattern: str) -> Iterator[Any]:
        """Yields the new lines of all files in ``folder`` that have a time, as every complete line has."""
        for path in sorted(folder.glob(pattern)):
            lines = self._files.setdefault(path, self.run.follow(path))
            yield from (line for line in lines.read() if "time" in line)

    def _add_event(self, event: Event) -> None:
        name = event.name
        kind = event.kind
        self._events[name] = event
        self._counts[kind.counter] += 1
        if kind.counter == FAILURES:
            self._failures[str(event.failure)] += 1
        if name == "step_skipped":
            self._counts["skipped_steps"] += event.steps
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
        values = {metric.name: self._line.get(metric.key) for metric in METRICS if metric.key is not None}
        started = self._events.get("started")
        if started is not None:
            values |= {"attempt": started.attempt, "allocated_gpus": started.gpus}
            values["nodes"] = len(started.nodes) or None
        saved = self._events.get("checkpoint_saved")
        if saved is not None:
            values["last_checkpoint_step"] = saved.step
            values["last_checkpoint_timestamp_seconds"] = saved.time
            values["last_checkpoint_bytes"] = saved.bytes
            values["last_checkpoint_duration_seconds"] = saved.seconds
        return {
            **values,
            "stalled": self._is_stalled(now),
            "last_progress_timestamp_seconds": self._progress or None,
            "planned_steps": self.run.record().get("total_steps"),
            **{name: self._counts[name] for name in {*COUNTERS, "skipped_steps"}},
            "checkpoint_failures_in_a_row": self._failed_saves,
        }

    def _labeled(self) -> dict[str, Samples]:
        job = self.identity
        step_s = self._line.get("step_s") or 0.0
        samples: dict[str, Samples] = {
            "run_info": {(job.job_id, job.partition, job.node, __version__): 1.0},
            "run_state": {(state,): float(state == self._state) for state in STATES},
            "failures": {(failure,): float(self._failures[failure]) for failure in FAILURE_CLASSES},
        }
        for name, direction in (("transmit", "tx"), ("receive", "rx")):
            per_step = {network: self._line.get(f"{network}_{direction}_bytes") for network in ("rdma", "net")}
            samples[f"network_{name}_bytes_per_second"] = {
                (network,): value / step_s for network, value in per_step.items() if value is not None and step_s
            }
        measured = self._events.get("preflight", Event()).bus_gb_per_s
        if measured:
            parts = (measured["nodes"].values(), measured["rails"], [measured["world"]])
            slowest: Samples = {}
            for part, rates in zip(FABRIC_PARTS, parts, strict=True):
                measured_rates = [rate for rate in rates if rate is not None]
                if measured_rates:
                    slowest[part,] = 1e9 * min(measured_rates)
            samples["preflight_bandwidth_bytes_per_second"] = slowest
        return samples

    def _is_stalled(self, now: float) -> bool:
        if self._state not in WORKING or not self._progress:
            return False
        times = list(self._line_times)
        usual = max((later - earlier for earlier, later in pairwise(times)), default=0.0)
        least = STALL_OTHER_MIN_S
        if self._state == "training":
            least = STALL_MIN_S
        return now - self._progress > max(least, STALL_FACTOR * usual)

    def _read_ledger(self, now: float) -> dict[str, Samples]:
        """Returns the values from the time ledger, which is read rarely, because it reads the whole run."""
        began = time.monotonic()
        is_over = self._state not in WORKING
        if began < self._ledger_due and not is_over:
            return self._ledger
        total = read_ledger(self.run, now=None if is_over else now).total
        self._ledger = {
            "goodput_ratio": {(): total.useful_share},
            "time_seconds": {(use,): getattr(total, f"{use}_s") for use in ACCOUNTS},
            "gpu_seconds": {(): total.gpu_s},
            "corrupted_steps": {(): total.corrupted_steps},
        }
        cost = time.monotonic() - began
        self._ledger_due = began + cost + max(LEDGER_EVERY_S, LEDGER_COST * cost)
        return self._ledger


if __name__ == "__main__":
    print(table())
