"""Waiting for submitted jobs: the live view, Ctrl-C, and the report at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from rich.console import Console

from hpc_train.launch.job import Job
from hpc_train.launch.queue import JobQueue
from hpc_train.launch.table import JobTable, plain_line
from hpc_train.launch.watch import View, resume_command
from hpc_train.run.exits import Exit
from hpc_train.telemetry.progress import Progress

POLL_S = 0.5
SECOND_CTRL_C_S = 3.0
PATIENCE_S = 5.0  # an agent that has not begun by then waits for its place


class JobProgress:
    """A single job: the same progress as in the foreground."""

    def __init__(self, job: Job, console: Console) -> None:
        self._console = console
        self._progress = Progress(job.run, console, _go_on(job))
        self._tells_at = time.monotonic() + PATIENCE_S

    def show(self, views: Sequence[View]) -> None:
        if views[0].state != "waiting":
            self._progress.tick()
        elif time.monotonic() > self._tells_at:
            self._tells_at = float("inf")
            self._console.print("waiting for a free place: other jobs hold the GPUs or cores", highlight=False)

    def close(self) -> None:
        self._progress.finish()


def wait(queue: JobQueue, console: Console) -> None:
    """Watches the jobs until all have ended.

    A Ctrl-C leaves them running; a second one within three seconds asks them to stop, and waits on.

    Raises:
        SystemExit: left by Ctrl-C, with code 130.
    """
    display = JobProgress(queue.jobs[0], console) if len(queue.jobs) == 1 else JobTable(queue.jobs, console)
    asked_to_stop = False
    try:
        while not queue.over:
            try:
                queue.advance()
                display.show(queue.views)
                time.sleep(POLL_S)
            except KeyboardInterrupt:
                if asked_to_stop or not _asks_twice(console):
                    leave(queue, console)
                asked_to_stop = True
                queue.drop_waiting()
                queue.submitter.stop(queue.open_ids)
                console.print("asked the jobs to save and stop; Ctrl-C leaves them to it", highlight=False)
    finally:
        display.close()


def _asks_twice(console: Console) -> bool:
    console.print("leaving; the jobs run on. Ctrl-C once more now stops them instead", highlight=False)
    try:
        time.sleep(SECOND_CTRL_C_S)
    except KeyboardInterrupt:
        return True
    return False


def leave(queue: JobQueue, console: Console) -> None:
    """Hands over what still waits, says how to stop it all, and ends this process with 130."""
    hand_over(queue, console)
    sys.exit(Exit.DETACHED)


def hand_over(queue: JobQueue, console: Console) -> None:
    """Submits what still waits; the jobs then need nobody here."""
    queue.submit_all()
    command = queue.submitter.stop_command(queue.open_ids)
    console.print(f"to save and stop them: {command}", markup=False, highlight=False, soft_wrap=True)


def report(queue: JobQueue, console: Console) -> Exit:
    """Says how each job ended, with the failing rank's own traceback; returns the code for all of them."""
    for job, view in zip(queue.jobs, queue.views, strict=True):
        if len(queue.jobs) > 1:
            line = f"{plain_line(job, view)} · {job.run.path}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        if view.message:
            print(f"job {job.number}: {view.message}\n  run directory: {job.run.path}", file=sys.stderr)
        if view.exit == Exit.STOPPED:
            print(f"stopped after a checkpoint; this goes on:\n  {_go_on(job)}")
    codes = [Exit.STOPPED if view.exit is None else view.exit for view in queue.views]
    order = (Exit.FAILED, Exit.REFUSED, Exit.GAVE_UP, Exit.STOPPED)
    return next((code for code in order if code in codes), Exit.DONE)


def _go_on(job: Job) -> str:
    return resume_command(job.overrides, job.run, job.config.run.root, submits=True)
