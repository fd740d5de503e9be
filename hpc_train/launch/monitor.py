"""Follows submitted jobs with a live table or plain lines, handles Ctrl-C, reports the results, and resubmits runs."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from rich.console import Console

from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.launch.cost import can_ask
from hpc_train.launch.executors.executor import Job
from hpc_train.launch.executors.select import select_executor
from hpc_train.launch.job_status import View, attempt_end, how_stopped, resume_command
from hpc_train.launch.job_table import JobTable, common_directory, print_messages, print_results
from hpc_train.launch.lookup import RunHandle
from hpc_train.launch.submission import JobQueue
from hpc_train.run.code import FrozenCode, frozen_code, has_changed, snapshot_code
from hpc_train.run.comparison import Comparison
from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import EventLog
from hpc_train.run.exits import Exit, worst_exit
from hpc_train.run.files import share
from hpc_train.run.lease import find_live, refuse_live
from hpc_train.run.owner import refuse_foreign, warn_if_open
from hpc_train.run.processes import this_process
from hpc_train.run.requests import stop_was_requested
from hpc_train.telemetry.progress import Progress

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
        print(f"{how_stopped(view.exit, view.state)}:\n  {_resume_hint(job)}")
    return worst(queue.views)


def _write_page(queue: JobQueue) -> None:
    """Writes the page of the sweep, or that of the run if its agents could not, and tells where it is."""
    from hpc_train.launch.page.build import write_after, write_sweep_at_end  # a submission does not need its modules

    if len(queue.jobs) == 1:
        write_after(queue.jobs[0].run)
        return
    known = {job.run.path: view for job, view in zip(queue.jobs, queue.views, strict=True)}
    write_sweep_at_end(queue.jobs[0].run.path.parent, known)


def worst(views: Sequence[View]) -> Exit:
    """Returns the exit code for several jobs: the worst of theirs."""
    return worst_exit(view.exit for view in views)


def _resume_hint(job: Job) -> str:
    if not job.overrides:  # it was resubmitted from its frozen config
        return shlex.join(["python", "-m", "hpc_train", "resume", str(job.run.path)])
    return resume_command(job.overrides, job.run, job.config.run.root, submits=True)


LEAVING_S = 30.0  # a job stays in Slurm for a few seconds after its agents have ended; a cancelled one saves first
POLL_LIVE_S = 3.0


def resubmit(
    found: Sequence[RunHandle],
    sweep: Path,
    *,
    detach: bool,
    trust_owner: bool = False,
    as_json: bool = False,
    code_now: bool = False,
    comparison: Comparison | None = None,
) -> int:
    """Submits frozen runs again, which resume from their newest checkpoints; returns their exit code, 0 when detached.

    Args:
        trust_owner: whether runs of other users may be continued.
        as_json: whether to print one JSON object per run at the end, and everything else to standard error.
        code_now: whether they run the code that is now in the work tree from which they were frozen.
        comparison: that of the whole sweep, if ``found`` is a part of one.

    Raises:
        UserError: a run is live or another user's, or its executor refuses it. Nothing was submitted.
    """
    for item in found if not trust_owner else ():
        refuse_foreign(item.run, item.config)
    warn_if_open(found[0].run, found[0].config)  # those of a sweep are alike
    console = Console(stderr=as_json)
    until = time.monotonic() + LEAVING_S
    for item in found:
        wait_if_ending(item.run, until, console)
        refuse_live(item.run)
    jobs = [item.job(trust_owner) for item in found]
    executor = select_executor(jobs[0].config.cluster)
    for line in executor.check(jobs):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    executor.confirm(jobs, console)
    for job in jobs:
        job.run.update_record(claimed_by=this_process())
    runs = [(item.run, item.config) for item in found]
    for line in take_code_again(runs) if code_now else notes_on_changed_code(runs):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    queue = JobQueue(jobs, executor, sweep, console)
    if detach:
        hand_over(queue, console)
    else:
        wait(queue, console, comparison)
    if as_json:
        print("\n".join(outcome(job.run, view) for job, view in zip(queue.jobs, queue.views, strict=True)))
        return Exit.DONE if detach else worst(queue.views)
    return Exit.DONE if detach else report(queue, console, comparison)


def outcome(run: RunDirectory, view: View) -> str:
    """Returns how a run stands, as a JSON object in one line."""
    return json.dumps({"run": str(run.path), "state": view.state, "exit_code": view.exit})


def wait_if_ending(run: RunDirectory, until: float, console: Console) -> None:
    """Waits until the job of a run leaves if it has ended or was stopped, at most until ``until``, and reports this.

    Args:
        until: of ``time.monotonic()``.
    """
    reported = False
    while (live := find_live(run)) and _is_ending(run) and time.monotonic() < until:
        if not reported:
            console.print(f"waiting until the stopped job has ended: {live}", markup=False, highlight=False)
        reported = True
        time.sleep(POLL_LIVE_S)


def _is_ending(run: RunDirectory) -> bool:
    """Returns whether a user has stopped the job, or its newest attempt has ended for good."""
    end = attempt_end(run, run.newest_attempt())
    return stop_was_requested(run) or (end is not None and end.final)


def take_code_again(runs: Sequence[tuple[RunDirectory, Config]]) -> list[str]:
    """Replaces the frozen code of ``runs`` by a snapshot of what is now in the work trees that it was taken from.

    The runs must not be live. Their event logs record the change.

    Returns:
        lines for the user.

    Raises:
        UserError: a work tree does not exist any more, or cannot be copied.
    """
    before = [frozen_code(run) for run, _ in runs]
    old = {code.origin: code for code in before if code is not None}
    new = {origin: _taken_again(code, [config for _, config in runs]) for origin, code in old.items()}
    changed = {origin for origin, code in new.items() if code.snapshot != old[origin].snapshot}
    for (run, _), code in zip(runs, before, strict=True):
        if code is not None and code.snapshot != new[code.origin].snapshot:
            after = new[code.origin]
            run.update_record(snapshot=asdict(after))
            events = EventLog.open(run, f"submitter-{os.uname().nodename}-{os.getpid()}", run.newest_attempt() + 1)
            events.write("warning", message=f"continues with other code: {code.snapshot} -> {after.snapshot}")
    lines = [f"code: the present code of {origin[0]}, copied to {new[origin].snapshot}" for origin in changed]
    lines += [f"code: {tree} has not changed since its code was frozen" for tree, *_ in old.keys() - changed]
    if None in before:
        lines.append("code: runs without frozen code import the present code in any case")
    return lines


def notes_on_changed_code(runs: Sequence[tuple[RunDirectory, Config]]) -> list[str]:
    """Returns a line for each work tree that differs from the frozen code with which ``runs`` continue."""
    frozen = [(frozen_code(run), config) for run, config in runs]
    old = {code.work_tree: (code, config) for code, config in frozen if code is not None}
    return [
        f"note: {tree} has changed since its code was frozen; the frozen code runs again (--code now: the present code)"
        for tree, (code, config) in old.items()
        if Path(tree).is_dir() and has_changed(code, config)
    ]


def _taken_again(code: FrozenCode, configs: Sequence[Config]) -> FrozenCode:
    directory, into = code.directory, Path(code.snapshot).parent
    taken = snapshot_code(configs, into, directory) if directory.is_dir() else None
    if taken is None or taken.work_tree != code.work_tree:
        raise UserError(
            f"the code was frozen from {code.work_tree}, which is not a git work tree any more",
            where="--code now",
            fix="restore the work tree, or leave out --code now to run the frozen code again",
        )
    if configs[0].run.group is not None:
        share(into, configs[0].run.group)
    return taken
