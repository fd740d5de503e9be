"""Slurm as this process sees it: the job around it, and the controller that it reaches."""

from __future__ import annotations

import os
import shutil
import sys
from functools import cache

from hpc_train.config.schema import ClusterConfig
from hpc_train.errors import UserError
from hpc_train.schedulers.slurm.client import Controller, find_controller, job_state, own_job
from hpc_train.schedulers.slurm.states import JobState
from hpc_train.schedulers.slurm.variables import Receiver, withheld


def in_allocation() -> bool:
    """Returns whether this process runs inside a Slurm job and can start steps in it."""
    return _has_job() and not _job_has_ended()


def check_shell(cluster: ClusterConfig) -> None:
    """Rejects the shell of a job that has ended, as one of tmux, for ``cluster=auto``, which would use the job.

    With another kind, the variables of the job are removed from this process, since a run would take it for its own.

    Raises:
        UserError: as said.
    """
    if not _has_job() or not _job_has_ended():
        return
    job_id = os.environ["SLURM_JOB_ID"]
    if cluster.kind == "auto":
        raise UserError(
            f"this shell belongs to Slurm job {job_id}, which has ended",
            where="SLURM_JOB_ID, cluster.kind",
            fix="unset SLURM_JOB_ID; or cluster=slurm -m submits a new job; or cluster=local trains on this machine",
        )
    print(f"note: the variables of Slurm job {job_id}, which has ended, are not used", file=sys.stderr)
    for name in withheld(Receiver.SBATCH):
        if name.startswith(("SLURM_", "SRUN_")):
            del os.environ[name]


def _has_job() -> bool:
    return "SLURM_JOB_ID" in os.environ and shutil.which("srun") is not None


def _job_has_ended() -> bool:
    """Returns whether the job of this shell has ended; False if Slurm does not respond."""
    state = _state_of_job(own_job(), os.environ.get("PATH"), os.environ.get("SLURM_CONF"))
    return state is not None and not state.is_alive


@cache
def _state_of_job(job_id: str, path: str | None, conf: str | None) -> JobState | None:
    """Returns the state of a job, cached per process, ``path`` and ``conf``, which select the controller."""
    return job_state(job_id)


def uses_slurm() -> bool:
    """Returns whether ``cluster=auto`` submits to Slurm outside of an allocation: a controller responds.

    Raises:
        UserError: there is a cluster whose controller does not respond, so that this may be a login node.
    """
    found, said = _controller()
    if found is Controller.UNCONFIGURED:
        _note_no_cluster(said, os.environ.get("PATH"), os.environ.get("SLURM_CONF"))
    if found is Controller.SILENT:
        raise UserError(
            f"Slurm is installed on this machine, but its controller does not respond: {said}",
            where="cluster.kind=auto" + (", SLURM_CONF" if "SLURM_CONF" in os.environ else ""),
            fix="try again when the controller responds (scontrol ping), or cluster=local to train on this machine",
        )
    return found is Controller.UP


def controller_answers() -> bool:
    """Returns whether ``sbatch`` exists and a Slurm controller is up; cached per process."""
    return _controller()[0] is Controller.UP


def _controller() -> tuple[Controller, str]:
    return _found_controller(os.environ.get("PATH"), os.environ.get("SLURM_CONF"))


@cache
def _found_controller(path: str | None, conf: str | None) -> tuple[Controller, str]:
    """Returns the controller, cached per process, ``path`` and ``conf``, which select it."""
    return find_controller()


@cache
def _note_no_cluster(said: str, path: str | None, conf: str | None) -> None:
    """Prints a note once per process, ``path`` and ``conf``."""
    print(
        f"note: Slurm's commands are on this machine, but find no cluster: training on this machine ({said})",
        file=sys.stderr,
    )
