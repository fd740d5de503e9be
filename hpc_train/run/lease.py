"""Implements the lease of a run. The agent of node 0 holds it while it works, so a run has one live attempt at a time.

The lease is a file lock with a heartbeat. An agent that was suspended until another took the lease over may not claim
further attempts; its workers' writes are fenced by their attempt number (``CheckpointStore.guard``). This module also
finds live submissions of a run in ``run.json``: processes on their own host, jobs through Slurm.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory, lease_folder
from hpc_train.run.file_lock import BEAT_S, STALE_S, Lock, LockHeld, LockOwner, acquire, heartbeats, newest_lock
from hpc_train.run.files import in_time
from hpc_train.run.owner import foreign_owner
from hpc_train.run.processes import is_alive, process
from hpc_train.run.requests import stop_was_requested
from hpc_train.schedulers.current import ENVIRONMENT, current_job, jobs_of
from hpc_train.schedulers.scheduler import SubmittedJobs
from hpc_train.schedulers.states import Phase

_POLL_S = 5.0
_FIX = "wait until it ends, stop it, or set another run.name"


def is_live(run: RunDirectory) -> bool:
    """Returns whether, to the knowledge of this machine, an agent is or may be working on this run."""
    lock = newest_lock(lease_folder(run.path))
    return lock is not None and lock.is_held(LockOwner.of_this_process())


@contextmanager
def hold_lease(
    run: RunDirectory,
    *,
    owner: LockOwner | None = None,
    on_loss: Callable[[], None] = lambda: None,
    give_up: Callable[[], bool] = lambda: False,
    beat_s: float = BEAT_S,
) -> Iterator[Lock]:
    """Holds the run's lease inside the ``with`` block.

    Waits for an owner elsewhere that has missed heartbeats, until it sends one or counts as dead.

    Args:
        owner: this process by default.
        on_loss: called once, in another thread, when another process has taken the lease over.
        give_up: ends the wait when it returns True.
        beat_s: seconds between heartbeats.

    Raises:
        UserError: another process holds the lease.
    """
    lock = _acquire_lease(run, owner or LockOwner.of_this_process(), give_up)
    try:
        with heartbeats(lock, on_loss, beat_s):
            yield lock
    finally:
        try:
            in_time(lock.give_back)
        except OSError as error:
            print(f"cannot release the run's lease; others wait until it expires: {error}", file=sys.stderr)


def _acquire_lease(run: RunDirectory, owner: LockOwner, give_up: Callable[[], bool]) -> Lock:
    printed = False
    while True:
        try:
            return acquire(lease_folder(run.path), owner)
        except LockHeld as error:
            silent = error.lock.silent_s()
            other = error.lock.owner()
            same_machine = other is not None and other.machine == owner.machine
            if not 3 * BEAT_S < silent < STALE_S or give_up() or same_machine:
                what = f"the run in {run.path} is live: {other or 'a process'} is working on it"
                raise UserError(what, where="run.name", fix=_FIX) from None
            if not printed:
                print(
                    f"no heartbeat of {other} for {silent:.0f} s; waiting at most {STALE_S - silent:.0f} s", flush=True
                )
            printed = True
        time.sleep(_POLL_S)


def add_submission(
    run: RunDirectory, executor: str, *, pid: int | None = None, job_id: str | None = None, **details: Any
) -> None:
    """Appends a submission to ``run.json``: a Slurm ``job_id``, or the ``pid`` of a process on this host.

    From then on the run belongs to its job, and not to the process that has submitted it and may wait for its end.
    """
    entry: dict[str, Any] = {"executor": executor, "time": time.time(), "job_id": job_id}
    if pid is not None:
        entry |= process(pid)
    submissions = [*run.record().get("submissions", []), entry | details]
    run.update_record(submissions=submissions, claimed_by={}, stop_requested=0.0)


# A job stays in Slurm for a few seconds after its agents have ended; one that a user has stopped saves first.
ENDING_JOB_WAIT_S = 30.0
POLL_LIVE_S = 3.0


def refuse_live(
    run: RunDirectory,
    *,
    is_ending: Callable[[RunDirectory], bool] = stop_was_requested,
    until: float | None = None,
    notify: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> None:
    """Raises UserError if another process or job is working on ``run`` or is queued for it.

    Waits for a job that is ending.

    Args:
        is_ending: whether the live job of the run is about to end. By default, it is if a user has stopped it.
        until: the value of ``time.monotonic()`` at which the wait ends; by default ``ENDING_JOB_WAIT_S`` from now.
        notify: called with a message before a wait.
    """
    if until is None:
        until = time.monotonic() + ENDING_JOB_WAIT_S
    waits = False
    while (live := find_live(run)) is not None:
        if not is_ending(run):
            raise UserError(f"the run in {run.path} is live: {live}", where="run.name", fix=_FIX)
        if time.monotonic() >= until:
            fix = f"python -m hpc_train wait {run.path}   waits until it has ended; then repeat this command"
            raise UserError(f"the run in {run.path} is stopping: {live}", where="run.name", fix=fix)
        if not waits:
            notify(f"waiting until the stopped job has ended: {live}")
        waits = True
        time.sleep(POLL_LIVE_S)


def find_live(run: RunDirectory) -> str | None:
    """Describes the process or job that works on ``run`` or is queued for it, if any, except this process."""
    record = run.record()
    claims = [*record.get("submissions", []), record.get("claimed_by", {})]
    for claim in claims:
        if is_alive(claim) and claim["pid"] != os.getpid():
            return f"process {claim['pid']} on {claim['host']}"
    job = current_job()
    this_job = {job.job_id, job.name}
    others = {job_id: claim for claim in claims for job_id in job_ids(claim)}
    for job_id, submission in others.items():
        if job_id not in this_job:
            jobs = jobs_of_submission(run, submission)
            state = jobs.state(job_id)
            if state is not None and state.phase is Phase.PENDING:
                return f"{jobs.name} job {job_id} is {state.name} (python -m hpc_train why {run.path} explains it)"
            if state is not None and state.is_alive:
                return f"{jobs.name} job {job_id} is {state.name}"
    return "its agent is working on it" if is_live(run) else None


def jobs_of_submission(run: RunDirectory, submission: dict[str, Any]) -> SubmittedJobs:
    """Returns the scheduler that knows the job of an entry of ``submissions`` in ``run.json``.

    Raises UserError if a custom scheduler cannot be loaded, or the run has files of another user who may have named it.
    """
    if submission.get("scheduler") not in (None, ENVIRONMENT) and foreign_owner(run) is not None:
        what = "the run has files of another user, so the scheduler that it names is not loaded"
        raise UserError(what, where=str(run.path), fix="ask the owner of the run for its state")
    return jobs_of(submission)


def first_file(run: RunDirectory, submission: int) -> Path:
    """Returns the file with the id of the job of ``cluster.first`` that has started first.

    Args:
        submission: the index of its entry in ``submissions`` of ``run.json``.
    """
    return run.attempts / f"first-{submission:03d}"


def only_started(run: RunDirectory, claim: dict[str, Any], submission: int) -> dict[str, Any]:
    """Returns an entry of ``submissions`` that names, of the jobs of ``cluster.first``, only the one that has started.

    The others are in its field ``withdrawn``. The entry is unchanged if no job has started, or it has none of these.
    Raises OSError or DamagedFile if the file cannot be read.
    """
    first = started_first(run, first_file(run, submission))
    if first not in claim["chain"]:
        return claim
    others = [job_id for job_id in claim["chain"] if job_id != first]
    return {**claim, "job_id": first, "chain": [], "withdrawn": others}


def started_first(run: RunDirectory, file: Path) -> str | None:
    """Returns the id of the job in a ``first_file``; None if no job has started. Raises as ``RunDirectory.read``."""
    return run.read(file).decode(errors="replace").strip() if file.exists() else None


def job_ids(claim: dict[str, Any]) -> list[str]:
    """Returns the Slurm job ids of a submission: one, or those of a chain or of ``cluster.first``."""
    return claim.get("chain") or [job_id for job_id in [claim.get("job_id")] if job_id]
