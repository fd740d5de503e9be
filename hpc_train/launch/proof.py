"""Proves that a process or job which the record of another user's run names is the caller's and works on that run.

The record of such a run is data of its owner, who can write any process id and job id into it.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory, lease_folder
from hpc_train.run.file_lock import LockOwner, newest_lock
from hpc_train.run.owner import files_below, foreign_files, user_name
from hpc_train.run.processes import started
from hpc_train.runs.job_status import ask, status_of
from hpc_train.runs.lookup import COMMENT, RunHandle
from hpc_train.schedulers.slurm.client import on_clusters

JOB_ID = re.compile(r"\d+(_\d+)?")


def refuse_unproven(item: RunHandle) -> None:
    """Raises UserError if a run of another user names a live process or job that is not proved to be the caller's.

    A process is proved by the lease of the run, in a file that the caller owns, or by its command line, which names
    the run directory. A job is proved by its user and its comment.
    """
    owner = foreign_owner(item.run)
    if owner is None:
        return
    if item.pid is not None and item.lives_here() and not _works_on(item.pid, item.run):
        raise _refusal(item.run, owner, f"process {item.pid}", f"kill {item.pid}")
    for job_id in _unproven_jobs(item):
        raise _refusal(item.run, owner, f"Slurm job {job_id}", f"scancel {job_id}")


def refuse_foreign_lease(run: RunDirectory) -> None:
    """Raises UserError if a run is another user's and the caller has no live process that works on it."""
    owner = foreign_owner(run)
    if owner is not None and _own_lease(run) is None:
        raise UserError(
            f"{run.path} belongs to {user_name(owner)}, and none of your processes works on it",
            where="RUN",
            fix=f"ask {user_name(owner)}, or name a run of yours",
        )


def foreign_owner(run: RunDirectory) -> int | None:
    """Returns the id of another user who owns the directory of a run or an entry of it; None if nobody does."""
    return next((user for _, user in foreign_files(files_below(run.path), run.path)), None)


def _refusal(run: RunDirectory, owner: int, what: str, command: str) -> UserError:
    return UserError(
        f"{run.path} belongs to {user_name(owner)} and names {what}, which is not proved to be yours and to work on "
        "this run",
        where=str(run.path),
        fix=f"`{command}`, if you want to end it nevertheless",
    )


def _works_on(pid: int, run: RunDirectory) -> bool:
    """Returns whether a process is the caller's and works on ``run``."""
    process = Path(f"/proc/{pid}")
    try:
        if process.stat().st_uid != os.geteuid():
            return False
        words = process.joinpath("cmdline").read_bytes().split(b"\0")
    except OSError:  # it has ended
        return False
    is_controller = len(words) > 3 and words[2].endswith(b"/hpc_train/launch/executors/controller.py")
    if is_controller and words[3] in (os.fsencode(run.logs), os.fsencode(run.logs / "submitit")):  # before 0.9
        return True
    owner = _own_lease(run)
    return owner is not None and owner.pid == pid and owner.started == started(pid)


def _own_lease(run: RunDirectory) -> LockOwner | None:
    """Returns the process that has taken the lease of ``run`` last, if it is the caller's: the caller owns its file."""
    lock = newest_lock(lease_folder(run.path))
    if lock is None:
        return None
    try:
        status = lock.path.lstat()
    except OSError:
        return None
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1:
        return lock.owner()
    return None


def _unproven_jobs(item: RunHandle) -> list[str]:
    """Returns the jobs of ``item`` that Slurm may know and that are not jobs of the caller for this run."""
    ids = [job_id for job_id in item.job_ids if JOB_ID.fullmatch(job_id)]
    if len(ids) < len(item.job_ids):
        return [str(job_id) for job_id in item.job_ids]
    if not ids:
        return []
    selection = [f"--jobs={','.join(ids)}", *on_clusters(item.clusters)]
    present = ask(selection)
    of_caller = ask(["--me", *selection])
    if present is None or of_caller is None:
        return ids
    comments = [f"{COMMENT}{path}" for path in (item.run.path, item.run.path.parent)]
    unproven = []
    for job_id in ids:
        status = status_of(job_id, present)
        if status is None or not status.present:
            continue
        mine = status_of(job_id, of_caller)
        # the user's comment may follow
        if mine is None or not any(f"{mine.comment} ".startswith(f"{comment} ") for comment in comments):
            unproven.append(job_id)
    return unproven
