"""Reads what the live view shows (``python -m hpc_train top``): a row per run, and more about one run.

Directories of runs that have ended are not read again. The list of runs, for which Slurm is asked, is read at most
twice a minute, whatever the interval of the view.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from hpc_train.report.pipeline_step import NAMES, rows_of, stage_times
from hpc_train.run.events import Event
from hpc_train.run.files import NewLines
from hpc_train.run.rows import mfu_name
from hpc_train.runs.job_status import JobStatuses, View, time_left
from hpc_train.runs.lookup import RunHandle, find_all_runs, find_runs, statuses_of, unreadable
from hpc_train.telemetry.progress import speed
from hpc_train.units import format_bytes, format_duration, format_metric, milliseconds

LIST_S = 30.0
EVENTS = 40  # the newest events of a run that are shown
STAGES = 11  # the number of lines that the view has for stages
SHARES = {"data_wait_share": "data", "comm_share": "communication", "bubble_share": "bubble", "host_share": "host"}


@dataclass(frozen=True)
class Row:
    """Holds one run of the list."""

    run: RunHandle
    name: str
    view: View

    def cells(self) -> tuple[str, ...]:
        """Returns the texts of name, state, progress, loss, speed, GPU use, time left and restarts."""
        line = self.view.metrics
        steps = self.view.steps
        progress = loss = gpu = left = ""
        if line.get("step") is not None:
            progress = f"{line['step']}/{steps or '?'}"
            if steps:
                progress += f" {100 * line['step'] // steps} %"
        if line.get("loss") is not None:
            loss = format_metric(line["loss"])
        if line.get("gpu_util") is not None:
            gpu = f"{100 * line['gpu_util']:.0f} %"
        seconds = time_left(self.view)
        if seconds is not None:
            left = format_duration(seconds)
        rate = next(iter(speed(line)), "")
        return self.name, self.view.state, progress, loss, rate, gpu, left, str(self.view.restarts or "")


@dataclass
class Runs:
    """Lists the runs below ``root`` and of this user in Slurm, or those of ``targets``."""

    root: Path
    targets: Sequence[str] = ()
    newest: int = 100
    clock: Callable[[], float] = time.monotonic
    note: str = ""
    _slurm: JobStatuses = field(default_factory=JobStatuses)
    _handles: list[RunHandle] = field(default_factory=list)
    _listed: float = float("-inf")
    _ended: dict[tuple[Path, str], View] = field(default_factory=dict)

    def rows(self) -> list[Row]:
        if self.clock() - self._listed >= LIST_S:
            self._listed = self.clock()
            self._handles = self._list()
        live = [item for item in self._handles if _key(item) not in self._ended]
        statuses = statuses_of(live, self._slurm)
        rows = []
        for item in self._handles:
            try:
                view = self._ended.get(_key(item)) or item.view(statuses)
            except Exception as error:
                view = View("unreadable", {}, message=unreadable(item.run, error).what)
            if view.exit is not None:
                self._ended[_key(item)] = view
            rows.append(Row(item, item.run.title, view))
        return rows

    def _list(self) -> list[RunHandle]:
        if self.targets:
            runs = [item for target in self.targets for item in find_runs(target, "top", unreadable=True)]
        else:
            overview = find_all_runs(self.root, self.newest)
            runs = overview.runs[::-1]
            self.note = "Slurm does not respond" if overview.silent else ""
        return [item for item in runs if item.error is None]


def _key(item: RunHandle) -> tuple[Path, str]:
    """Identifies a submission of a run, so that a resumed run counts as live again."""
    return item.run.path, str(item.submission.get("first_attempt", ""))


@dataclass
class Details:
    """Follows one run; each call of ``look`` reads only what was appended since the last one.

    Attributes:
        losses: the losses of the logged steps, in the order of the steps.
        rates: the samples per second of the logged steps.
        stages: a line for each pipeline stage with its times in the newest recorded step; empty without a pipeline.
    """

    run: RunHandle
    losses: dict[int, float] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    stages: list[str] = field(default_factory=list)
    _readers: dict[Path, NewLines] = field(default_factory=dict)

    def look(self) -> None:
        for path in sorted(self.run.run.metrics.glob("attempt-*.jsonl")):
            for line in self._new(path):
                for values, key in ((self.losses, "loss"), (self.rates, "samples_per_s")):
                    while values and line.step <= next(reversed(values)):  # a rollback or restart repeats steps
                        values.popitem()
                    if isinstance(line.get(key), float):
                        values[line.step] = line[key]
        new: list[Event] = [event for path in self.run.run.events.glob("*.jsonl") for event in self._new(path)]
        for event in new:
            if event.name == "pipeline_step":
                self.stages = _stages(event)
        shown = [event for event in new if event.kind.in_top]
        self.events = sorted([*self.events, *shown], key=attrgetter("time"))[-EVENTS:]

    def lines(self, view: View) -> list[str]:
        """Returns lines about the time and memory of the newest step."""
        newest = view.metrics or self.run.run.newest_metrics(max(0, self.run.run.newest_attempt()))
        values = {key: value for key, value in newest.items() if value is not None}
        shares = [f"{word} {100 * values[key]:.0f} %" for key, word in SHARES.items() if key in values]
        lines = [self.run.run.path.as_posix()]
        if "step_s" in values:
            lines.append(f"step: {values['step_s']:.3g} s")
        if shares:
            lines.append(f"waiting: {', '.join(shares)}")
        if "peak_memory_bytes" in values:
            lines.append(f"peak memory: {format_bytes(values['peak_memory_bytes'])}")
        if "mfu" in values:
            lines.append(f"{mfu_name(values)}: {100 * values['mfu']:.1f} %")
        if "val_loss" in values:
            lines.append(f"validation loss: {format_metric(values['val_loss'])}")
        return [*lines, *view.message.splitlines()[-3:]]

    def _new(self, path: Path) -> Iterator[Any]:
        yield from self._readers.setdefault(path, self.run.run.follow(path)).read()


def _stages(event: Event) -> list[str]:
    """Returns lines such as ``stage 0, rank 0: forward 1.5 ms, backward 3 ms, waiting 25 %``."""
    lines = []
    for stage in stage_times(rows_of(event), event.seconds):
        means = ", ".join(f"{NAMES[kind]} {milliseconds(seconds)}" for kind, seconds in stage.means.items())
        lines.append(f"stage {stage.stage}, rank {stage.rank}: {means}, waiting {100 * stage.waited:.0f} %")
    if len(lines) > STAGES:
        lines[STAGES:] = [f"and {len(lines) - STAGES} more"]
    return [f"a step under {event.schedule}, per micro-batch:", *lines]
