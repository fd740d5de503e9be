"""Follows submitted jobs with a live table or plain lines, handles Ctrl-C, reports the results, and resubmits runs."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hpc_train.config.schema import Config
from hpc_train.launch.comparison import Comparison
from hpc_train.launch.cost import can_ask
from hpc_train.launch.executors.executor import Job
from hpc_train.launch.executors.select import select_executor
from hpc_train.launch.job_status import View, attempt_end, resume_command, time_left
from hpc_train.launch.lookup import RunHandle
from hpc_train.launch.submission import JobQueue
from hpc_train.run.code import take_code_again
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.run.lease import find_live, refuse_live
from hpc_train.run.owner import refuse_foreign, warn_if_open
from hpc_train.run.processes import this_process
from hpc_train.telemetry.progress import Progress
from hpc_train.units import format_duration

POLL_S = 0.5
SECOND_CTRL_C_S = 3.0
PATIENCE_S = 5.0  # an agent that has not started by then waits for GPUs or cores


class JobProgress:
    """The progress of a single job, displayed as for a run in the foreground."""

    def __init__(self, job: Job, console: Console) -> None:
        self._console = console
        self._progress = Progress(job.run, console, _resume_hint(job) if job.overrides else None)
        self._announce_at = time.monotonic() + PATIENCE_S
        self._shown = ""

    def show(self, views: Sequence[View]) -> None:
        view = views[0]
        if view.state in ("starting", "running"):
            self._progress.tick()
        elif view.state == "waiting":
            if time.monotonic() > self._announce_at:
                self._announce_at = float("inf")
                self._console.print("waiting for free GPUs or cores: other jobs hold them", highlight=False)
        elif view.exit is None and view.state not in (self._shown, "finishing", "failing"):
            self._shown = view.state
            self._console.print(view.state, markup=False, highlight=False)

    def close(self) -> None:
        self._progress.finish()


def wait(queue: JobQueue, console: Console, comparison: Comparison | None = None) -> None:
    """Follows the jobs until all have ended.

    Ctrl-C or a lost terminal detaches and leaves them running. At a terminal, a second Ctrl-C within three seconds
    offers to cancel them; if accepted, this continues to wait.

    Args:
        comparison: that of the whole sweep, if the jobs are a part of one.

    Raises:
        SystemExit: detached by Ctrl-C or hang-up, with code 130.
    """
    single = len(queue.jobs) == 1
    display = JobProgress(queue.jobs[0], console) if single else JobTable(queue.jobs, console, comparison)
    try:
        with _hang_up_raises():
            _watch(queue, display, console)
    except HangUp:
        with contextlib.suppress(OSError):  # the terminal is gone
            leave(queue, console)
        sys.exit(Exit.DETACHED)
    finally:
        with contextlib.suppress(OSError):
            display.close()


def _watch(queue: JobQueue, display: JobProgress | JobTable, console: Console) -> None:
    ending = False
    while not queue.over:
        try:
            queue.advance()
            display.show(queue.views)
            time.sleep(POLL_S)
        except KeyboardInterrupt:
            answer = "" if ending else _answer(console)
            if answer not in ("y", "s"):
                leave(queue, console)
            ending = True
            queue.stop_all(cancel=answer == "y")
            console.print("stopping the jobs; press Ctrl-C to exit without waiting", highlight=False)


class HangUp(Exception):
    """The terminal is gone."""


@contextlib.contextmanager
def _hang_up_raises() -> Iterator[None]:
    def raise_it(number: int, frame: FrameType | None) -> None:
        raise HangUp

    before = signal.getsignal(signal.SIGHUP)
    if before != signal.SIG_IGN:  # nohup stays nohup
        signal.signal(signal.SIGHUP, raise_it)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _answer(console: Console) -> str:
    """Asks after a second Ctrl-C; returns y or s, or another answer that keeps the jobs running."""
    console.print("detaching; the jobs keep running. Press Ctrl-C again now to cancel them", highlight=False)
    try:
        time.sleep(SECOND_CTRL_C_S)
        return ""
    except KeyboardInterrupt:
        if not can_ask(console):
            return ""
    try:
        question = "\ncancel the jobs? y: now, s: after saving a checkpoint, n: no, keep them running [n] "
        return console.input(question, markup=False).strip().lower()[:1]
    except (KeyboardInterrupt, EOFError):
        return ""


def leave(queue: JobQueue, console: Console) -> None:
    """Submits the waiting jobs, prints how to stop all of them, and exits with code 130."""
    hand_over(queue, console)
    sys.exit(Exit.DETACHED)


def hand_over(queue: JobQueue, console: Console) -> None:
    """Submits the waiting jobs, which then do not need this process, and prints how to manage all jobs."""
    queue.submit_all()
    where = _common_directory([job.run.path for job in queue.jobs])
    lines = [
        f"to save and stop:  python -m hpc_train cancel {where} --save",
        f"to cancel:         python -m hpc_train cancel {where}",
        f"to follow:         python -m hpc_train {'logs -f' if len(queue.jobs) == 1 else 'wait'} {where}",
    ]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _common_directory(paths: Sequence[Path]) -> str:
    path = paths[0] if len(paths) == 1 else Path(os.path.commonpath(paths))
    shown = os.path.relpath(path)
    return shlex.quote(str(path) if shown.startswith("..") else shown)


def report(queue: JobQueue, console: Console, comparison: Comparison | None = None) -> Exit:
    """Prints how each job ended, with the traceback of the failing rank; returns the exit code for all of them.

    Args:
        comparison: that of the whole sweep, if the jobs are a part of one.
    """
    print_messages(queue.jobs, queue.views)
    if len(queue.jobs) > 1:
        print_results(queue.jobs, queue.views, console, comparison)
        return worst(queue.views)
    (job,), (view,) = queue.jobs, queue.views
    if view.exit == Exit.STOPPED:
        how = "cancelled" if view.state == "cancelled" else "stopped after a checkpoint"
        print(f"{how}; resume with:\n  {_resume_hint(job)}")
    return worst(queue.views)


MESSAGES = 5  # failures that are printed whole; the others are left to the command why


def print_messages(jobs: Sequence[TableRow], views: Sequence[View]) -> None:
    """Prints why jobs have failed, to standard error; equal messages once."""
    failed: dict[str, list[TableRow]] = {}
    for job, view in zip(jobs, views, strict=True):
        if view.message:
            failed.setdefault(view.message, []).append(job)
    for message, same in [*failed.items()][:MESSAGES]:
        numbers = ", ".join(str(job.number) for job in same[:ROWS]) + (", ..." if len(same) > ROWS else "")
        head = f"job {numbers}" if len(same) == 1 else f"jobs {numbers}"
        print(f"{head}: {message}\n  run directory: {same[0].run.path}", file=sys.stderr)
    if len(failed) > MESSAGES:
        print(f"{len(failed) - MESSAGES} more failures are not shown", file=sys.stderr)


def print_results(
    jobs: Sequence[TableRow], views: Sequence[View], console: Console, comparison: Comparison | None = None
) -> None:
    """Prints the table of the jobs of a sweep, the best of them, and what to do about those that did not finish.

    Args:
        comparison: that of the whole sweep, if the jobs are a part of one.
    """
    found = comparison or Comparison.of([job.run for job in jobs], jobs[0].config)
    if not console.is_terminal:
        console.width = 200  # rich would squeeze the table of a pipe into 80 columns
    if not console.is_terminal or len(jobs) > ROWS:  # otherwise the live table is still there
        console.print(table_of(jobs, views, found, range(len(jobs)), ended=True), highlight=False)
    best = found.best(views)
    lines = []
    if best is not None:
        metric = found.ranked_by(views)
        which = f"{_short_path(jobs[best].run.path)} ({found.words(jobs[best].run)})".removesuffix(" ()")
        lines.append(f"best by {metric.name}: {which}: {found.values(views)[best]:.4f}")
    states = Counter(view.state for view in views)
    lines.append(f"{len(jobs)} jobs: " + ", ".join(f"{count} {state}" for state, count in states.most_common()))
    where = _common_directory([job.run.path.parent for job in jobs])
    if any(view.exit not in (None, Exit.DONE) for view in views):
        lines.append(f"to see why:    python -m hpc_train why {where}")
        lines.append(f"to run again:  {retry_command(where)}")
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def table_of(
    jobs: Sequence[TableRow], views: Sequence[View], comparison: Comparison, shown: Sequence[int], *, ended: bool
) -> Table:
    """Returns a table with the state, the overrides that differ, and the metrics of jobs.

    Args:
        shown: the indices of the jobs in the table.
        ended: the jobs have ended: show their directories instead of their speed.
    """
    metric, best, values = comparison.ranked_by(views).name, comparison.best(views), comparison.values(views)
    table = Table(box=None, pad_edge=False)
    for name in ("job", "strategy", *comparison.columns, "state"):
        table.add_column(name)
    for name in ("nodes", "step", "loss", *([] if metric == "loss" else [metric])):
        table.add_column(name, justify="right")
    for name in () if ended else ("tokens/s", "time left", "restarts"):
        table.add_column(name, justify="right")
    if ended:
        table.add_column("run directory", overflow="fold")
    for index in shown:
        job, value = jobs[index], values[index]
        number, strategy, state, nodes, step, loss, *rest = cells(job, views[index])
        measured = [loss] if metric == "loss" else [loss, "" if value is None else f"{value:.4f}"]
        measured[-1] += BEST if index == best else ""
        last = [_short_path(job.run.path)] if ended else rest
        table.add_row(*map(Text, (number, strategy, *comparison.row(job.run), state, nodes, step, *measured, *last)))
    return table


BEST = " (best)"


def retry_command(sweep: str) -> str:
    """Returns the command that submits the runs of ``sweep`` that did not finish again."""
    return f"python -m hpc_train retry --failed {sweep}   (--code now: with the present code)"


def _short_path(path: Path) -> str:
    return min(str(path), os.path.relpath(path), key=len)


def worst(views: Sequence[View]) -> Exit:
    """Returns the exit code for several jobs: the worst of theirs."""
    codes = [Exit.STOPPED if view.exit is None else view.exit for view in views]
    order = (Exit.FAILED, Exit.REFUSED, Exit.GAVE_UP, Exit.STOPPED)
    return next((code for code in order if code in codes), Exit.DONE)


def _resume_hint(job: Job) -> str:
    if not job.overrides:  # it was resubmitted from its frozen config
        return shlex.join(["python", "-m", "hpc_train", "resume", str(job.run.path)])
    return resume_command(job.overrides, job.run, job.config.run.root, submits=True)


LINE_EVERY_S = 10.0
ROWS = 30  # a terminal shows no more; jobs that have ended are counted instead


class TableRow(Protocol):
    """What the table shows of a job besides its view."""

    @property
    def number(self) -> int: ...

    @property
    def config(self) -> Config: ...

    @property
    def run(self) -> RunDirectory: ...


class JobTable:
    """A live table of jobs. ``show`` updates it; ``close`` leaves the last state on the screen."""

    def __init__(self, jobs: Sequence[TableRow], console: Console, comparison: Comparison | None = None) -> None:
        self._jobs = jobs
        self._comparison = comparison or Comparison.of([job.run for job in jobs], jobs[0].config)
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
        best, count = self._comparison.best(views), len(views)
        # the best one, and those that are not done
        order = sorted(range(count), key=lambda index: (index != best, views[index].exit == 0, index))
        table = table_of(self._jobs, views, self._comparison, sorted(order[:ROWS]), ended=False)
        if count > ROWS:
            done = sum(view.exit == 0 for view in views)
            table.caption = f"{count} jobs, {done} done, {count - ROWS} not shown"
        return table

    def _lines(self, views: Sequence[View]) -> None:
        now, compared = time.monotonic(), self._comparison
        for job, view in zip(self._jobs, views, strict=True):
            state, shown_at = self._shown.get(job.number, ("", 0.0))
            if view.state != state or (view.state == "running" and now - shown_at > LINE_EVERY_S):
                self._shown[job.number] = (view.state, now)
                line = plain_line(job, view, zip(compared.columns, compared.row(job.run), strict=True))
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def cells(job: TableRow, view: View) -> tuple[str, ...]:
    """Returns the cells of one row: job, strategy, state, nodes, step, loss, tokens/s, time left, restarts."""
    metrics, steps = view.metrics, view.steps
    step, loss, speed = metrics.get("step"), metrics.get("loss"), metrics.get("tokens_per_s")
    seconds = time_left(view)
    left = "" if seconds is None else format_duration(seconds)
    return (
        str(job.number),
        job.config.strategy.name,
        view.state,
        str(view.nodes or job.config.cluster.nodes),
        "" if step is None else f"{step}" + (f"/{steps}" if steps else ""),
        "" if loss is None else f"{loss:.4f}",
        "" if speed is None else f"{speed:,.0f}",
        left,
        str(view.restarts or ""),
    )


def plain_line(job: TableRow, view: View, overrides: Iterable[tuple[str, str]] = ()) -> str:
    """Returns one line with the state of a job; ``overrides`` are those that differ between the jobs."""
    number, strategy, state, _, step, loss, speed, left, restarts = cells(job, view)
    parts = [f"job {number}", strategy, *(f"{key}={value}" for key, value in overrides), state]
    parts += [text for value, text in ((step, f"step {step}"), (loss, f"loss {loss}")) if value]
    parts += [text for value, text in ((speed, f"{speed} tokens/s"), (left, f"{left} left")) if value]
    parts += [f"{restarts} restart{'s' if view.restarts > 1 else ''}"] if restarts else []
    return " · ".join(parts)


LEAVING_S = 30.0  # a job stays in Slurm for a few seconds after its agents have ended
POLL_LIVE_S = 3.0


def resubmit(
    found: Sequence[RunHandle],
    sweep: Path,
    *,
    detach: bool,
    trust_owner: bool = False,
    code_now: bool = False,
    comparison: Comparison | None = None,
) -> int:
    """Submits frozen runs again, which resume from their newest checkpoints; returns their exit code, 0 when detached.

    Args:
        trust_owner: whether runs of other users may be continued.
        code_now: whether they run the code that is now in the work tree from which they were frozen.
        comparison: that of the whole sweep, if ``found`` is a part of one.

    Raises:
        UserError: a run is live or another user's, or its executor refuses it. Nothing was submitted.
    """
    for item in found if not trust_owner else ():
        refuse_foreign(item.run, item.config)
    warn_if_open(found[0].run, found[0].config)  # those of a sweep are alike
    console = Console()
    until = time.monotonic() + LEAVING_S
    for item in found:
        while time.monotonic() < until and find_live(item.run) and _has_ended(item):
            time.sleep(POLL_LIVE_S)
        refuse_live(item.run)
    jobs = [item.job(trust_owner) for item in found]
    executor = select_executor(jobs[0].config.cluster)
    for line in executor.check(jobs):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    executor.confirm(jobs, console)
    for job in jobs:
        job.run.update_record(claimed_by=this_process())
    if code_now:
        lines = take_code_again([(item.run, item.config) for item in found])
        console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    queue = JobQueue(jobs, executor, sweep, console)
    if detach:
        hand_over(queue, console)
        return Exit.DONE
    wait(queue, console, comparison)
    return report(queue, console, comparison)


def _has_ended(item: RunHandle) -> bool:
    end = attempt_end(item.run, item.run.newest_attempt())
    return end is not None and end.final
