"""Prints the tables of several jobs: a live one while they run, and their results, with the best of them."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table

from hpc_train.config.run_path import relative
from hpc_train.config.schema import Config
from hpc_train.run.code import frozen_code
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.runs.comparison import Comparison, evaluated_parts, metric_of
from hpc_train.runs.job_status import NOT_STARTED, View, time_left
from hpc_train.telemetry.progress import parts_of_line, shown_loss, speed_column
from hpc_train.telemetry.terminal import text_table, wide
from hpc_train.units import counted, format_duration, format_metric

LINE_EVERY_S = 10.0
ROWS = 30  # a terminal shows no more; jobs that have ended are counted instead


class TableRow(Protocol):
    """Interface of the data of a job that the table shows besides its view."""

    @property
    def number(self) -> int: ...

    @property
    def config(self) -> Config: ...

    @property
    def strategy(self) -> str: ...

    @property
    def asked_nodes(self) -> int | str: ...

    @property
    def run(self) -> RunDirectory: ...


class JobTable:
    """Shows a live table of jobs. ``show`` updates it; ``close`` leaves the last state on the screen."""

    def __init__(self, jobs: Sequence[TableRow], console: Console, comparison: Comparison | None = None) -> None:
        self._jobs = jobs
        self._comparison = comparison or Comparison.of((job.run for job in jobs), metric_of(jobs[0].config))
        self._console = console
        self._live: Live | None = None
        self._shown: dict[int, tuple[str, float]] = {}

    def show(self, views: Sequence[View]) -> None:
        if self._console.is_terminal:
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False)
                self._live.start()
            self._live.update(self._table(views), refresh=True)
        else:
            self._lines(views)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _table(self, views: Sequence[View]) -> Table:
        best = self._comparison.best(views)
        count = len(views)
        # the best one, and those that are not done
        order = sorted(range(count), key=lambda index: (index != best, views[index].exit == 0, index))
        table = table_of(self._jobs, views, self._comparison, sorted(order[:ROWS]), ended=False)
        if count > ROWS:
            done = sum(view.exit == 0 for view in views)
            table.caption = f"{count} jobs, {done} done, {count - ROWS} not shown"
        return table

    def _lines(self, views: Sequence[View]) -> None:
        now = time.monotonic()
        compared = self._comparison
        for job, view in zip(self._jobs, views, strict=True):
            state, shown_at = self._shown.get(job.number, ("", 0.0))
            if view.state != state or (view.state == "running" and now - shown_at > LINE_EVERY_S):
                self._shown[job.number] = (view.state, now)
                line = plain_line(job, view, zip(compared.columns, compared.row(job.run), strict=True))
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def cells(job: TableRow, view: View) -> tuple[str, ...]:
    """Returns the cells of one row: job, strategy, state, nodes, step, loss, time left, restarts."""
    metrics = view.metrics
    step = loss = left = ""
    if metrics.get("step") is not None:
        step = str(metrics["step"])
        if view.steps:
            step += f"/{view.steps}"
    if "loss" in metrics:
        loss = shown_loss(metrics["loss"])
    seconds = time_left(view)
    if seconds is not None:
        left = format_duration(seconds)
    nodes = str(view.nodes or job.asked_nodes)
    return str(job.number), job.strategy, view.state, nodes, step, loss, left, str(view.restarts or "")


def plain_line(job: TableRow, view: View, overrides: Iterable[tuple[str, str]] = ()) -> str:
    """Returns one line with the state of a job; ``overrides`` are those that differ between the jobs."""
    parts = [f"job {job.number}", job.strategy, *(f"{key}={value}" for key, value in overrides), view.state]
    return " · ".join([*parts, *parts_of_line(view.metrics, view.steps, time_left(view), view.restarts)])


MESSAGES = 5  # failures that are printed whole; the others are left to the command why


def print_messages(jobs: Sequence[TableRow], views: Sequence[View]) -> None:
    """Prints to standard error why jobs have failed; messages that differ only in numbers are printed once."""
    failed: dict[str, tuple[str, list[TableRow]]] = {}
    for job, view in zip(jobs, views, strict=True):
        if view.message:
            failed.setdefault(re.sub(r"\d+", "0", view.message), (view.message, []))[1].append(job)
    for message, same in [*failed.values()][:MESSAGES]:
        numbers = [str(job.number) for job in same[:ROWS]]
        if len(same) > ROWS:
            numbers.append("...")
        head = "job" if len(same) == 1 else "jobs"
        print(f"{head} {', '.join(numbers)}: {message}\n  run directory: {same[0].run.path}", file=sys.stderr)
    if len(failed) > MESSAGES:
        print(f"{len(failed) - MESSAGES} more failures are not shown", file=sys.stderr)


def print_results(
    jobs: Sequence[TableRow],
    views: Sequence[View],
    console: Console,
    comparison: Comparison | None = None,
    *,
    live: bool = True,
) -> None:
    """Prints the table of the jobs of a sweep, the best of them, and what to do about those that did not finish.

    Args:
        comparison: the comparison of the whole sweep, if the jobs are only a part of it.
        live: whether a terminal shows a live table of the jobs already.
    """
    comparison = comparison or Comparison.of((job.run for job in jobs), metric_of(jobs[0].config))
    wide(console)
    if not (live and console.is_terminal) or len(jobs) > ROWS:  # otherwise the screen still shows the live table
        console.print(table_of(jobs, views, comparison, range(len(jobs)), ended=True), highlight=False)
    best = comparison.best(views)
    lines = evaluated_parts(job.run for job in jobs)
    if best is not None:
        metric = comparison.ranked_by(views)
        which = f"{short_path(jobs[best].run.path)} ({comparison.words(jobs[best].run)})".removesuffix(" ()")
        lines.append(f"best by {metric.name}: {which}: {format_metric(comparison.values(views)[best])}")
    states = [f"{count} {state}" for state, count in Counter(view.state for view in views).most_common()]
    lines.append(f"{counted(len(jobs), 'job', 'jobs')}: {', '.join(states)}")
    where = common_directory([job.run.path.parent for job in jobs])
    if best is not None or len(jobs) < len(comparison.settings):
        lines.append(f"python -m hpc_train compare {where}   ranks the runs of the sweep")
    if any(map(is_unfinished, views)):
        lines.append(f"python -m hpc_train why {where}   names the causes")
        lines += retry_lines(where, jobs[0].run, views)
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class JobRows:
    """Holds the rows of a table of jobs, for a terminal or a page.

    Attributes:
        names: the first columns, which hold words.
        numbers: the other columns.
    """

    names: tuple[str, ...]
    numbers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def rows_of(
    jobs: Sequence[TableRow], views: Sequence[View], comparison: Comparison, shown: Sequence[int], *, ended: bool
) -> JobRows:
    """Returns the state, the overrides that differ, and the metrics of jobs.

    Args:
        shown: the indices of the jobs in the table.
        ended: whether the jobs have ended; then their speed is left out.
    """
    metric = comparison.ranked_by(views).name
    best = comparison.best(views)
    values = comparison.values(views)
    unit, speeds = speed_column(views[index].metrics for index in shown)
    numbers = ["nodes", "step", "loss"]
    if metric != "loss":
        numbers.append(metric)
    if not ended:
        numbers += [unit, "time left", "restarts"]
    rows = []
    for index, rate in zip(shown, speeds, strict=True):
        job = jobs[index]
        value = values[index]
        number, strategy, state, nodes, step, loss, *rest = cells(job, views[index])
        row = [number, strategy, *comparison.row(job.run), state, nodes, step, loss]
        if metric != "loss":
            row.append(format_metric(value))
        if index == best:
            row[-1] += BEST
        if not ended:
            row += [rate, *rest]
        rows.append(tuple(row))
    return JobRows(("job", "strategy", *comparison.columns, "state"), tuple(numbers), tuple(rows))


def table_of(
    jobs: Sequence[TableRow], views: Sequence[View], comparison: Comparison, shown: Sequence[int], *, ended: bool
) -> Table:
    """Returns ``rows_of`` as a table for a terminal; the rows of ``ended`` jobs end with their directories."""
    table = rows_of(jobs, views, comparison, shown, ended=ended)
    columns = (*table.names, *table.numbers)
    rows = list(table.rows)
    if ended:
        columns = (*columns, DIRECTORY)
        rows = [(*row, short_path(jobs[index].run.path)) for row, index in zip(rows, shown, strict=True)]
    return text_table(columns, rows, table.numbers, [DIRECTORY])


DIRECTORY = "run directory"
BEST = " (best)"


def retry_lines(sweep: str, run: RunDirectory, views: Sequence[View]) -> list[str]:
    """Returns the commands that submit the unfinished runs of ``sweep`` again, with comments on what they do. ``run``
    is any of its runs, which all have the same frozen code."""
    runs = counted(sum(map(is_unfinished, views)), "run", "runs")
    command = f"python -m hpc_train retry --failed {sweep}"
    if frozen_code(run) is None:
        return [f"{command}   submits {runs} again, which import your present code"]
    lines = [f"{command}   submits {runs} again, with the same code"]
    if any(view.exit not in (None, Exit.DONE, Exit.STOPPED) for view in views):
        lines.append(f"{command} --code now   with the present code, after you have corrected it")
    return lines


def is_unfinished(view: View) -> bool:
    """Returns whether a job has ended, or was given up before its start, and its run is not done."""
    return view.state == NOT_STARTED or view.exit not in (None, Exit.DONE)


def short_path(path: Path) -> str:
    """Returns the path, or the path relative to the current directory if it is shorter."""
    return min(str(path), os.path.relpath(path), key=len)


def common_directory(paths: Sequence[Path]) -> str:
    """Returns the one of ``paths``, or the directory that contains all of them, for a command line."""
    return shlex.quote(relative(Path(os.path.commonpath(paths))))
