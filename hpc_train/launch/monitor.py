"""Follows submitted jobs with a live table or plain lines, handles Ctrl-C, reports the results, and resubmits runs."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table

from hpc_train.config.schema import Config
from hpc_train.launch.cost import can_ask
from hpc_train.launch.executors.executor import Job
from hpc_train.launch.executors.select import select_executor
from hpc_train.launch.job_status import View, attempt_end, how_stopped, resume_command, time_left
from hpc_train.launch.lookup import RunHandle
from hpc_train.launch.submission import JobQueue
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


def wait(queue: JobQueue, console: Console) -> None:
    """Follows the jobs until all have ended.

    Ctrl-C or a lost terminal detaches and leaves them running. At a terminal, a second Ctrl-C within three seconds
    offers to cancel them; if accepted, this continues to wait.

    Raises:
        SystemExit: detached by Ctrl-C or hang-up, with code 130.
    """
    display = JobProgress(queue.jobs[0], console) if len(queue.jobs) == 1 else JobTable(queue.jobs, console)
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


def report(queue: JobQueue, console: Console) -> Exit:
    """Prints how each job ended, with the traceback of the failing rank; returns the exit code for all of them."""
    for job, view in zip(queue.jobs, queue.views, strict=True):
        if len(queue.jobs) > 1:
            line = f"{plain_line(job, view)} · {job.run.path}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        if view.message:
            print(f"job {job.number}: {view.message}\n  run directory: {job.run.path}", file=sys.stderr)
        if view.state in ("cancelled", "stopped") and view.exit is not None:
            print(f"{how_stopped(view.exit, view.state)}:\n  {_resume_hint(job)}")
    return worst(queue.views)


def worst(views: Sequence[View]) -> Exit:
    """Returns the exit code for several jobs: the worst of theirs. Jobs that were not started are like the others."""
    ended = [view.exit for view in views if view.exit is not None]
    codes = ended if Exit.STOPPED in ended or len(ended) == len(views) else [*ended, Exit.FAILED]
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


class JobTable:
    """A live table of jobs. ``show`` updates it; ``close`` leaves the last state on the screen."""

    def __init__(self, jobs: Sequence[TableRow], console: Console) -> None:
        self._jobs = jobs
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
        table = Table(box=None, pad_edge=False)
        for name in ("job", "strategy", "state"):
            table.add_column(name)
        for name in ("nodes", "step", "loss", "tokens/s", "time left", "restarts"):
            table.add_column(name, justify="right")
        rows = list(zip(self._jobs, views, strict=True))
        shown = sorted(rows, key=lambda row: (row[1].exit == 0, row[0].number))[:ROWS]
        for job, view in sorted(shown, key=lambda row: row[0].number):
            table.add_row(*cells(job, view))
        if len(rows) > ROWS:
            done = sum(view.exit == 0 for view in views)
            table.caption = f"{len(rows)} jobs, {done} done, {len(rows) - len(shown)} not shown"
        return table

    def _lines(self, views: Sequence[View]) -> None:
        now = time.monotonic()
        for job, view in zip(self._jobs, views, strict=True):
            state, shown_at = self._shown.get(job.number, ("", 0.0))
            if view.state != state or (view.state == "running" and now - shown_at > LINE_EVERY_S):
                self._shown[job.number] = (view.state, now)
                self._console.print(plain_line(job, view), markup=False, highlight=False, soft_wrap=True)


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


def plain_line(job: TableRow, view: View) -> str:
    number, strategy, state, _, step, loss, speed, left, restarts = cells(job, view)
    parts = [f"job {number}", strategy, state]
    parts += [text for value, text in ((step, f"step {step}"), (loss, f"loss {loss}")) if value]
    parts += [text for value, text in ((speed, f"{speed} tokens/s"), (left, f"{left} left")) if value]
    parts += [f"{restarts} restart{'s' if view.restarts > 1 else ''}"] if restarts else []
    return " · ".join(parts)


LEAVING_S = 30.0  # a job stays in Slurm for a few seconds after its agents have ended
POLL_LIVE_S = 3.0


def resubmit(found: Sequence[RunHandle], sweep: Path, *, detach: bool, trust_owner: bool = False) -> int:
    """Submits frozen runs again, which resume from their newest checkpoints; returns their exit code, 0 when detached.

    Args:
        trust_owner: whether runs of other users may be continued.

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
    queue = JobQueue(jobs, executor, sweep, console)
    if detach:
        hand_over(queue, console)
        return Exit.DONE
    wait(queue, console)
    return report(queue, console)


def _has_ended(item: RunHandle) -> bool:
    end = attempt_end(item.run, item.run.newest_attempt())
    return end is not None and end.final
