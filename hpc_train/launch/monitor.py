"""Follows submitted jobs with a live table or plain lines, handles Ctrl-C, and reports the results."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Protocol

from rich.console import Console

from hpc_train.launch.executors.cost import can_ask
from hpc_train.launch.job import Job
from hpc_train.launch.submission import JobQueue
from hpc_train.registration import RUN_WAITED_FOR, SWEEP_WAITED_FOR, registered
from hpc_train.run.exits import Exit, worst_exit
from hpc_train.runs.comparison import Comparison
from hpc_train.runs.job_status import View, how_stopped, resume_command
from hpc_train.runs.job_table import JobTable, common_directory, print_messages, print_results
from hpc_train.telemetry.progress import Progress

POLL_S = 0.5
SECOND_CTRL_C_S = 3.0
PATIENCE_S = 5.0  # an agent that has not started by then waits for GPUs or cores


class Display(Protocol):
    """Shows jobs while they run."""

    def show(self, views: Sequence[View]) -> None: ...

    def close(self) -> None: ...


class JobProgress:
    """The progress of a single job, displayed as for a run in the foreground."""

    def __init__(self, job: Job, console: Console) -> None:
        self._console = console
        self._progress = Progress(job.run, console, _resume_hint(job) if job.overrides else None)
        self._announce_at = time.monotonic() + PATIENCE_S
        self._shown = ""
        self._exit: int | None = None

    def show(self, views: Sequence[View]) -> None:
        view = views[0]
        self._exit = view.exit
        if view.state in ("starting", "running"):
            self._progress.tick()
        elif view.state == "waiting":
            if time.monotonic() > self._announce_at:
                self._announce_at = float("inf")
                self._console.print("waiting for GPUs or cores that other jobs of the sweep hold", highlight=False)
        elif view.exit is None and view.state not in (self._shown, "finishing", "failing"):
            self._shown = view.state
            self._console.print(view.state, markup=False, highlight=False)

    def close(self) -> None:
        # the record of a job that was refused, or is left, may have the result of an earlier one
        self._progress.finish(failed=self._exit != Exit.DONE)


def wait(
    queue: JobQueue, console: Console, comparison: Comparison | None = None, display: Display | None = None
) -> None:
    """Follows the jobs until all have ended.

    Ctrl-C or a lost terminal detaches and leaves them running. At a terminal, a second Ctrl-C within three seconds
    offers to cancel them; if accepted, this continues to wait.

    Args:
        comparison: that of the whole sweep, if the jobs are a part of one.
        display: by default the progress of a single job, or a table of several.

    Raises:
        SystemExit: detached by Ctrl-C or hang-up, with code 130.
    """
    if display is None and len(queue.jobs) == 1:
        display = JobProgress(queue.jobs[0], console)
    display = display or JobTable(queue.jobs, console, comparison)
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


def _watch(queue: JobQueue, display: Display, console: Console) -> None:
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
    where = common_directory([job.run.path for job in queue.jobs])
    lines = [
        f"to save and stop:  python -m hpc_train cancel {where} --save",
        f"to cancel:         python -m hpc_train cancel {where}",
        f"to follow:         python -m hpc_train {'logs -f' if len(queue.jobs) == 1 else 'wait'} {where}",
    ]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def report(queue: JobQueue, console: Console, comparison: Comparison | None = None) -> Exit:
    """Prints how each job ended, with the traceback of the failing rank; returns the exit code for all of them.

    Args:
        comparison: that of the whole sweep, if the jobs are a part of one.
    """
    print_messages(queue.jobs, queue.views)
    if len(queue.jobs) > 1:
        print_results(queue.jobs, queue.views, console, comparison)
        _write_page(queue)
        return worst(queue.views)
    _write_page(queue)
    (job,), (view,) = queue.jobs, queue.views
    if view.state in ("cancelled", "stopped") and view.exit is not None:
        print(f"{how_stopped(view.exit, job.run, view.state)}:\n  {_resume_hint(job)}")
    return worst(queue.views)


def _write_page(queue: JobQueue) -> None:
    """Writes the page of the sweep, or that of the run if its agents could not, and tells where it is."""
    if len(queue.jobs) == 1:
        registered(RUN_WAITED_FOR)(queue.jobs[0].run)
        return
    known = {job.run.path: view for job, view in zip(queue.jobs, queue.views, strict=True)}
    registered(SWEEP_WAITED_FOR)(queue.jobs[0].run.path.parent, known)


def worst(views: Sequence[View]) -> Exit:
    """Returns the exit code for several jobs: the worst of theirs."""
    return worst_exit(view.exit for view in views)


def _resume_hint(job: Job) -> str:
    if not job.overrides:  # it was resubmitted from its frozen config
        return shlex.join(["python", "-m", "hpc_train", "resume", str(job.run.path)])
    return resume_command(job.overrides, job.run, job.config.run.root, submits=True)
