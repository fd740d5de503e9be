"""Submits the jobs of one launch, follows them with a live table or plain lines, and reports the results.

An executor without a queue (this machine) receives only as many jobs as may run at the same time, so that a sweep of a
thousand jobs does not start a thousand waiting processes. On detaching, the remaining jobs are submitted too, and wait
for the locks of running jobs. Frozen runs are resubmitted with their frozen code, or with the present code of the work
tree from which it was copied.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Protocol

from rich.console import Console

from hpc_train.config.schema import Config
from hpc_train.config.values import runs_own_code
from hpc_train.errors import UserError
from hpc_train.launch.executors.cost import can_ask
from hpc_train.launch.executors.executor import Executor, select_executor
from hpc_train.launch.job import Job
from hpc_train.layout.resolve import resolve_layout
from hpc_train.registration import RUN_WAITED_FOR, SWEEP_WAITED_FOR, registered
from hpc_train.run.code import FrozenCode, frozen_code
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.exits import Exit, worst_exit
from hpc_train.run.files import concurrently, share
from hpc_train.run.freeze import claim_run
from hpc_train.run.lease import ENDING_JOB_WAIT_S, add_submission, refuse_live
from hpc_train.run.owner import warn_if_open
from hpc_train.run.requests import record_stop_request, stop_was_requested
from hpc_train.run.snapshot import check_copy, has_changed, snapshot_code
from hpc_train.runs.comparison import Comparison
from hpc_train.runs.job_status import (
    NOT_STARTED,
    JobStatus,
    View,
    attempt_end,
    how_stopped,
    outcome,
    resume_command,
    view_of,
)
from hpc_train.runs.job_table import JobTable, common_directory, print_messages, print_results
from hpc_train.runs.lookup import RunHandle
from hpc_train.telemetry.progress import Progress
from hpc_train.telemetry.terminal import Terminal

ANNOUNCED_SINGLY = 20  # with more jobs only their number is printed
WAITING = View("waiting", {})


@dataclass(frozen=True)
class Submitted:
    """A submitted job. Attempts before ``first_attempt`` belong to earlier submissions of the same run."""

    job: Job
    job_id: str
    first_attempt: int
    agent_output: Path

    def view(self, status: JobStatus | None) -> View:
        """Returns the present state of the job. ``status`` is the status that the scheduler reports; None if the
        scheduler does not know the job."""
        config = self.job.config
        steps = None if runs_own_code(config) else config.train.steps  # otherwise the run records them
        return view_of(self.job.run, self.first_attempt, status, self.agent_output, steps)


class JobQueue:
    """Submits frozen jobs in order and keeps a view of each."""

    def __init__(self, jobs: Sequence[Job], executor: Executor, sweep: Path, console: Console) -> None:
        self.jobs = list(jobs)
        self.executor = executor
        self._sweep = sweep
        self._console = console
        self._at_once = executor.at_once(jobs)
        self._waiting = list(jobs)
        self._submitted: dict[int, Submitted] = {}
        self._views: dict[int, View] = {}
        self.stopped = False  # whether the user of this process has stopped the jobs

    @property
    def views(self) -> list[View]:
        """The views of the jobs, in order."""
        return [self._views.get(job.number, WAITING) for job in self.jobs]

    @property
    def over(self) -> bool:
        return not self._waiting and not self._open()

    @property
    def open_ids(self) -> list[str]:
        """The ids of the submitted jobs that have not ended."""
        return [item.job_id for item in self._open()]

    def advance(self) -> None:
        """Updates the views and submits as many jobs as may run."""
        statuses = self.executor.statuses(self.open_ids)
        for item in self._open():
            self._views[item.job.number] = item.view(statuses.get(item.job_id))
        room = self._at_once - len(self._open())
        self._submit(self._waiting[: max(0, room)])

    def submit_all(self) -> None:
        self._submit(self._waiting)

    def stop_all(self, *, cancel: bool) -> None:
        """Drops the waiting jobs and stops the submitted ones; with ``cancel`` they need not save a checkpoint."""
        self.stopped = True
        for job in self._waiting:
            self._views[job.number] = View(NOT_STARTED, {}, exit=None)
        self._waiting = []
        for item in self._open():
            record_stop_request(item.job.run)
        self.executor.cancel(self.open_ids, save=not cancel)

    def _open(self) -> list[Submitted]:
        return [
            item
            for number, item in self._submitted.items()
            if number not in self._views or self._views[number].exit is None
        ]

    def _submit(self, jobs: Sequence[Job]) -> None:
        if not jobs:
            return
        first_attempts = [job.run.newest_attempt() + 1 for job in jobs]
        ids = self.executor.submit(jobs, self._sweep, self._at_once)
        entries = list(map(Submitted, jobs, ids, first_attempts, map(self.executor.output, jobs, ids)))
        try:
            for _ in concurrently(self._record, entries):
                pass
        except BaseException:  # an unrecorded job could start its run a second time, and no command could cancel it
            self.executor.cancel(ids)
            raise
        self._submitted |= {entry.job.number: entry for entry in entries}
        self._waiting = self._waiting[len(jobs) :]
        if len(jobs) > ANNOUNCED_SINGLY:
            text = f"{len(jobs)} jobs to {self.executor.name}, {ids[0]} to {ids[-1]}: {self._sweep}"
            self._console.print(text, markup=False, soft_wrap=True)
            return
        for job, job_id in zip(jobs, ids, strict=True):
            device = f"{job.gpus} GPUs per node" if job.gpus else "on CPUs"
            lines = [
                f"job {job.number}: {job.config.strategy.name}: {job.layout}, {device}; "
                f"{self.executor.name}, job id {job_id}",
                f"  {job.run.path}",
                *(f"  note: {note}" for note in job.layout.notes),
            ]
            if job.choice is not None:
                lines.append(f"  {job.choice.lines[0]}; table: {job.run.plan}")
            self._console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)

    def _record(self, submitted: Submitted) -> None:
        run = submitted.job.run
        identity = self.executor.identity(submitted.job_id)
        add_submission(run, self.executor.name, first_attempt=submitted.first_attempt, **identity)


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
                text = "the agent has not started yet; other jobs of a sweep may hold the GPUs or cores"
                self._console.print(text, highlight=False)
        elif view.exit is None and view.state not in (self._shown, "finishing", "failing"):
            self._shown = view.state
            self._console.print(view.state, markup=False, highlight=False)

    def close(self) -> None:
        # if the job was refused or still runs, its record may hold the result of an earlier job
        self._progress.finish(failed=self._exit != Exit.DONE)


def wait(
    queue: JobQueue, console: Console, comparison: Comparison | None = None, display: Display | None = None
) -> None:
    """Follows the jobs until all have ended.

    Ctrl-C or a lost terminal detaches and leaves the jobs running. At a terminal, a second Ctrl-C within three seconds
    offers to cancel them; if the user accepts, this function continues to wait. Raises SystemExit with code 130 after
    Ctrl-C or a hang-up.

    Args:
        comparison: the comparison of the full sweep, if the jobs are a part of one.
        display: by default the progress of a single job, or a table of several jobs.
    """
    if display is None and len(queue.jobs) == 1:
        display = JobProgress(queue.jobs[0], console)
    display = display or JobTable(queue.jobs, console, comparison)
    stopping = False
    detached = False
    try:
        with _hang_up_raises():
            while not (queue.over or detached):
                try:
                    queue.advance()
                    display.show(queue.views)
                    time.sleep(POLL_S)
                except KeyboardInterrupt:
                    answer = "" if stopping else _answer(console)
                    detached = answer not in ("y", "s")
                    if not detached:
                        stopping = True
                        queue.stop_all(cancel=answer == "y")
                        console.print("stopping the jobs; press Ctrl-C to exit without waiting", highlight=False)
    except HangUp:
        with contextlib.suppress(OSError):  # the terminal is gone
            leave(queue, console)
        sys.exit(Exit.DETACHED)
    finally:
        with contextlib.suppress(OSError):
            display.close()  # prints the last state, which the commands of ``leave`` follow
    if detached:
        leave(queue, console)


class HangUp(Exception):
    """Reports that the terminal has hung up."""


@contextlib.contextmanager
def _hang_up_raises() -> Iterator[None]:
    def raise_it(number: int, frame: FrameType | None) -> None:
        raise HangUp

    before = signal.getsignal(signal.SIGHUP)
    if before != signal.SIG_IGN:  # nohup ignores SIGHUP
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
    """Submits the waiting jobs, so that no job needs this process any more, and prints the commands that manage
    them."""
    queue.submit_all()
    where = common_directory([job.run.path for job in queue.jobs])
    lines = [
        f"to save and stop:  python -m hpc_train cancel {where} --save",
        f"to cancel:         python -m hpc_train cancel {where}",
        f"to follow:         python -m hpc_train {'logs -f' if len(queue.jobs) == 1 else 'wait'} {where}",
    ]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def report(queue: JobQueue, console: Console, comparison: Comparison | None = None) -> Exit:
    """Prints how each job ended, with the traceback of the failing rank, and the path of its page.

    Args:
        comparison: the comparison of the full sweep, if the jobs are a part of one.

    Returns:
        the exit code of the command.
    """
    print_messages(queue.jobs, queue.views)
    if len(queue.jobs) > 1:
        print_results(queue.jobs, queue.views, console, comparison)
        views = {job.run.path: view for job, view in zip(queue.jobs, queue.views, strict=True)}
        registered(SWEEP_WAITED_FOR)(queue.jobs[0].run.path.parent, views)
        return worst(queue.views)
    (job,), (view,) = queue.jobs, queue.views
    registered(RUN_WAITED_FOR)(job.run)  # writes the report page if the agents could not
    if view.state in ("cancelled", "stopped") and view.exit is not None:
        print(f"{how_stopped(view.exit, job.run, view.state)}:\n  {_resume_hint(job)}")
    return worst(queue.views)


def worst(views: Sequence[View]) -> Exit:
    """Returns the worst exit code of the jobs."""
    return worst_exit(view.exit for view in views)


def _resume_hint(job: Job) -> str:
    if not job.overrides:  # it was resubmitted from its frozen config
        return shlex.join(["python", "-m", "hpc_train", "resume", str(job.run.path)])
    return resume_command([*job.options, *job.overrides], job.run, job.config.run.root, submits=True)


def resubmit(
    handles: Sequence[RunHandle],
    sweep: Path,
    *,
    detach: bool,
    as_json: bool = False,
    code_now: bool = False,
    comparison: Comparison | None = None,
) -> int:
    """Resubmits frozen runs, which resume from their newest checkpoints; returns their exit code, 0 when detached.

    Raises UserError if a run is live or its executor refuses it; nothing is submitted in that case.

    Args:
        as_json: whether to print one JSON object per run at the end, and everything else to standard error.
        code_now: whether to run the present code of the work tree instead of the frozen copy.
        comparison: the comparison of the full sweep, if ``handles`` is a part of it.
    """
    warn_if_open(handles[0].run, handles[0].config)  # the runs of a sweep are alike
    copies = {str(item.run.record().get("snapshot")): item.run for item in handles}  # a sweep has one copy
    if not code_now:
        for run in copies.values():
            check_copy(run)
    console = Terminal(stderr=as_json)
    until = time.monotonic() + ENDING_JOB_WAIT_S
    show = partial(console.print, markup=False, highlight=False)
    for item in handles:
        refuse_live(item.run, is_ending=_is_ending, until=until, notify=show)
    jobs = []
    for item in handles:
        shape = select_executor(item.config.cluster).shape(item.config)
        layout = resolve_layout(item.config, shape.nodes, shape.workers, shape.device_bytes)
        jobs.append(Job(item.config, layout, shape, item.run, number=item.number, trust_owner=item.trusts_owner))
    executor = select_executor(jobs[0].config.cluster)
    for line in executor.check(jobs):
        show(line, soft_wrap=True)
    executor.confirm(jobs, console)
    for job in jobs:
        claim_run(job.run)
    runs = [(item.run, item.config) for item in handles]
    lines = take_code_again(runs) if code_now else notes_on_changed_code(runs)
    for line in lines:
        show(line, soft_wrap=True)
    queue = JobQueue(jobs, executor, sweep, console)
    if detach:
        hand_over(queue, console)
    else:
        wait(queue, console, comparison)
    if as_json:
        print("\n".join(outcome(job.run, view) for job, view in zip(queue.jobs, queue.views, strict=True)))
    if detach:
        return Exit.DONE
    return worst(queue.views) if as_json else report(queue, console, comparison)


def _is_ending(run: RunDirectory) -> bool:
    """Returns whether a user has stopped the job, or its newest attempt has ended for good."""
    end = attempt_end(run, run.newest_attempt())
    return stop_was_requested(run) or (end is not None and end.final)


def take_code_again(runs: Sequence[tuple[RunDirectory, Config]]) -> list[str]:
    """Replaces the frozen code of ``runs`` by a new snapshot of the work trees from which it was copied.

    The runs must not be live. Their event logs record the change. Returns lines for the user. Raises UserError if a
    work tree no longer exists or cannot be copied.
    """
    frozen = [(run, frozen_code(run)) for run, _ in runs]
    configs = [config for _, config in runs]
    old = {code.origin: code for _, code in frozen if code is not None}
    new = {origin: _taken_again(code, configs, runs[0][0].code) for origin, code in old.items()}
    # the name of a copy is the hash of its content; its directory may differ
    changed = {origin for origin in old if Path(new[origin].snapshot).name != Path(old[origin].snapshot).name}
    for run, code in frozen:
        if code is not None and Path(code.snapshot).name != Path(new[code.origin].snapshot).name:
            after = new[code.origin]
            run.update_record(snapshot=asdict(after))
            events = EventLog.open(run, f"submitter-{os.uname().nodename}-{os.getpid()}", run.newest_attempt() + 1)
            events.write("warning", message=f"continues with other code: {code.snapshot} -> {after.snapshot}")
    lines = [f"code: the present code of {origin[0]}, copied to {new[origin].snapshot}" for origin in changed]
    lines += [f"code: {tree} has not changed since its code was frozen" for tree, *_ in old.keys() - changed]
    if any(code is None for _, code in frozen):
        lines.append("code: no code was frozen for these runs, so they import your present code")
    return lines


def notes_on_changed_code(runs: Sequence[tuple[RunDirectory, Config]]) -> list[str]:
    """Returns a line for each work tree that has changed since the code was frozen with which ``runs`` continue."""
    frozen = [(frozen_code(run), config) for run, config in runs]
    old = {code.work_tree: (code, config) for code, config in frozen if code is not None}
    return [
        f"note: {tree} has changed since its code was frozen; the frozen code runs again (--code now: the present code)"
        for tree, (code, config) in old.items()
        if Path(tree).is_dir() and has_changed(code, config)
    ]


def _taken_again(code: FrozenCode, configs: Sequence[Config], directory: Path) -> FrozenCode:
    """Returns a new snapshot of the work tree of ``code``, stored next to the old one if that is in a directory of the
    same name as ``directory``, otherwise in ``directory``."""
    before = Path(code.snapshot).parent
    if before.name == directory.name:
        directory = before
    taken = None
    if code.directory.is_dir():
        taken = snapshot_code(configs, directory, code.directory)
    if taken is None or taken.work_tree != code.work_tree:
        raise UserError(
            f"the code was frozen from {code.work_tree}, which is no longer a git work tree",
            where="--code now",
            fix="restore the work tree, or leave out --code now to run the frozen code again",
        )
    if configs[0].run.group is not None:
        share(Path(taken.snapshot).parent, configs[0].run.group)
    return taken
