"""Submits frozen runs again, with their frozen code or with what is now in the work tree that it was copied from."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.launch.executors.executor import select_executor
from hpc_train.launch.job import Job
from hpc_train.launch.submission import JobQueue, hand_over, report, wait, worst
from hpc_train.layout.resolve import resolve_layout
from hpc_train.run.code import FrozenCode, frozen_code
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.exits import Exit
from hpc_train.run.files import share
from hpc_train.run.freeze import claim_run
from hpc_train.run.lease import ENDING_JOB_WAIT_S, refuse_live
from hpc_train.run.owner import warn_if_open
from hpc_train.run.requests import stop_was_requested
from hpc_train.run.snapshot import check_copy, has_changed, snapshot_code
from hpc_train.runs.comparison import Comparison
from hpc_train.runs.job_status import attempt_end, outcome
from hpc_train.runs.lookup import RunHandle
from hpc_train.telemetry.terminal import Terminal


def resubmit(
    handles: Sequence[RunHandle],
    sweep: Path,
    *,
    detach: bool,
    as_json: bool = False,
    code_now: bool = False,
    comparison: Comparison | None = None,
) -> int:
    """Submits frozen runs again, which resume from their newest checkpoints; returns their exit code, 0 when detached.

    Raises UserError if a run is live, or its executor refuses it. Nothing was submitted.

    Args:
        as_json: whether to print one JSON object per run at the end, and everything else to standard error.
        code_now: whether they run the code that is now in the work tree from which they were frozen.
        comparison: the comparison of the full sweep, if ``handles`` is a part of it.
    """
    warn_if_open(handles[0].run, handles[0].config)  # the runs of a sweep are alike
    copies = {str(item.run.record().get("snapshot")): item.run for item in handles}  # the runs of a sweep share one
    if not code_now:
        for run in copies.values():
            check_copy(run)
    console = Terminal(stderr=as_json)
    until = time.monotonic() + ENDING_JOB_WAIT_S
    show = partial(console.print, markup=False, highlight=False)
    for item in handles:
        refuse_live(item.run, is_ending=_is_ending, until=until, tell=show)
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
    """Replaces the frozen code of ``runs`` by a snapshot of what is now in the work trees that it was taken from.

    The runs must not be live. Their event logs record the change. Raises UserError if a work tree no longer exists, or
    cannot be copied. Returns lines for the user.
    """
    frozen = [(run, frozen_code(run)) for run, _ in runs]
    configs = [config for _, config in runs]
    old = {code.origin: code for _, code in frozen if code is not None}
    new = {origin: _taken_again(code, configs, runs[0][0].code) for origin, code in old.items()}
    # the content of a copy is its name; its directory may differ
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
    """Returns a line for each work tree that differs from the frozen code with which ``runs`` continue."""
    frozen = [(frozen_code(run), config) for run, config in runs]
    old = {code.work_tree: (code, config) for code, config in frozen if code is not None}
    return [
        f"note: {tree} has changed since its code was frozen; the frozen code runs again (--code now: the present code)"
        for tree, (code, config) in old.items()
        if Path(tree).is_dir() and has_changed(code, config)
    ]


def _taken_again(code: FrozenCode, configs: Sequence[Config], directory: Path) -> FrozenCode:
    """Returns a snapshot of the present code; ``directory``, that of a run or sweep which has a copy, keeps it."""
    before = Path(code.snapshot).parent
    if before.name == directory.name:
        directory = before
    taken = None
    if code.directory.is_dir():
        taken = snapshot_code(configs, directory, code.directory)
    if taken is None or taken.work_tree != code.work_tree:
        raise UserError(
            f"the code was frozen from {code.work_tree}, which is not a git work tree any more",
            where="--code now",
            fix="restore the work tree, or leave out --code now to run the frozen code again",
        )
    if configs[0].run.group is not None:
        share(Path(taken.snapshot).parent, configs[0].run.group)
    return taken
