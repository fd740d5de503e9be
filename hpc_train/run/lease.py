"""One live attempt per run: the agent of node 0 holds the run's lease as long as it works on it.

The lease is a turn (see ``turns``), with a sign of life every few seconds. An agent that was asleep long enough to be
passed over learns of it and may claim no attempt any more; what its workers still do is fenced by the number of their
attempt (``CheckpointStore.guard``).

Who works on a run: the submissions in ``run.json``, and whether one of them is still alive.

Processes are looked up on their own host; Slurm is asked about Slurm's jobs.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory, lease_folder
from hpc_train.run.file_lock import BEAT_S, STALE_S, Lock, LockOwner, LockTaken, acquire, newest_lock
from hpc_train.run.files import patiently
from hpc_train.run.processes import is_alive, process
from hpc_train.slurm.client import job_state

_POLL_S = 5.0


def is_live(run: RunDirectory) -> bool:
    """Whether an agent is at work on this run at this moment, or may be, as far as this machine can tell."""
    found = newest_lock(lease_folder(run.path))
    return found is not None and found.is_held(LockOwner.of_this_process())


@contextmanager
def hold_lease(
    run: RunDirectory,
    *,
    holder: LockOwner | None = None,
    on_loss: Callable[[], None] = lambda: None,
    give_up: Callable[[], bool] = lambda: False,
    beat_s: float = BEAT_S,
) -> Iterator[Lock]:
    """Holds the run's lease inside the ``with`` block.

    A holder elsewhere that has missed some signs of life is waited for, until it gives one or counts as dead.

    Args:
        holder: this process, unless a test says otherwise.
        on_loss: called once, in another thread, when another process has taken the lease over.
        give_up: ends the wait.
        beat_s: seconds between signs of life.

    Raises:
        UserError: another process holds it.
    """
    turn = _take(run, holder or LockOwner.of_this_process(), give_up)
    ended = threading.Event()
    threading.Thread(target=_beat, args=(turn, ended, on_loss, beat_s), name="lease", daemon=True).start()
    try:
        yield turn
    finally:
        ended.set()
        try:
            patiently(turn.give_back)
        except OSError as error:
            print(f"the run's lease cannot be given back, others wait until it has expired: {error}", file=sys.stderr)


def _take(run: RunDirectory, holder: LockOwner, give_up: Callable[[], bool]) -> Lock:
    told = False
    while True:
        try:
            return acquire(lease_folder(run.path), holder)
        except LockTaken as error:
            silent = error.turn.silent_s()
            if not 3 * BEAT_S < silent < STALE_S or give_up() or _is_here(error.turn, holder):
                raise _live(run.path, str(error.turn.holder() or "a process")) from None
            if not told:
                left = STALE_S - silent
                print(f"{error.turn.holder()} is silent for {silent:.0f} s; waiting {left:.0f} s at most", flush=True)
            told = True
        time.sleep(_POLL_S)


def _is_here(turn: Lock, holder: LockOwner) -> bool:
    other = turn.holder()
    return other is not None and other.machine == holder.machine


def _beat(turn: Lock, ended: threading.Event, on_loss: Callable[[], None], beat_s: float) -> None:
    while not ended.wait(beat_s):
        with suppress(OSError):  # a file server that is away; the next one may reach it
            turn.beat()
            if not turn.is_newest():
                on_loss()
                return


def _live(path: Path, who: str) -> UserError:
    return UserError(
        f"the run in {path} is live: {who} is at work",
        where="run.name",
        fix="wait for it, stop it, or take another run.name",
    )


def add_submission(
    run: RunDirectory, door: str, *, pid: int | None = None, job_id: str | None = None, **details: Any
) -> None:
    """Appends a submission to ``run.json``: a Slurm ``job_id``, or the ``pid`` of a process on this host."""
    entry: dict[str, Any] = {"door": door, "time": time.time(), "job_id": job_id}
    if pid is not None:
        entry |= process(pid)
    run.update_record(submissions=[*run.record().get("submissions", []), entry | details])


def refuse_live(run: RunDirectory) -> None:
    """Raises UserError where another process or job works on ``run`` or waits to."""
    live = find_live(run)
    if live is not None:
        raise UserError(
            f"the run in {run.path} is live: {live}",
            where="run.name",
            fix="wait for it, stop it, or take another run.name",
        )


def find_live(run: RunDirectory) -> str | None:
    """Words for what works on ``run`` or waits to; None where nothing does. This process itself does not count."""
    record = run.record()
    claims = [*record.get("submissions", []), record.get("claimed_by", {})]
    for claim in claims:
        if is_alive(claim) and claim["pid"] != os.getpid():
            return f"process {claim['pid']} on {claim['host']}"
    for job_id, clusters in {job_id: claim.get("clusters") for claim in claims for job_id in job_ids(claim)}.items():
        state = None if job_id in _own_jobs() else job_state(job_id, clusters)
        if state is not None and state.is_alive:
            return f"Slurm job {job_id} is {state.name}"
    return "its agent is at work" if is_live(run) else None


def job_ids(claim: dict[str, Any]) -> list[str]:
    """Of a submission to Slurm: one, or those of a chain."""
    return claim.get("chain") or [job_id for job_id in [claim.get("job_id")] if job_id]


def _own_jobs() -> set[str]:
    environment = os.environ
    own = {environment.get("SLURM_JOB_ID", "")}
    if "SLURM_ARRAY_JOB_ID" in environment:
        own.add(f"{environment['SLURM_ARRAY_JOB_ID']}_{environment.get('SLURM_ARRAY_TASK_ID', '')}")
    return own
