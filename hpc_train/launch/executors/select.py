"""Selects the executor of jobs: the surrounding allocation, Slurm, or this machine; imports only the selected one."""

from __future__ import annotations

import os
import shutil
from functools import cache

from hpc_train.config.schema import ClusterConfig
from hpc_train.errors import UserError
from hpc_train.launch.executors.executor import Executor
from hpc_train.slurm.client import controller_responds


def select_executor(cluster: ClusterConfig) -> Executor:
    """Returns the executor for ``cluster.kind``; ``auto`` tries the surrounding allocation, Slurm and this machine.

    Raises:
        UserError: Slurm is requested, and ``sbatch`` is missing.
    """
    if cluster.kind == "auto" and in_allocation():
        from hpc_train.launch.executors.allocation import AllocationExecutor

        return AllocationExecutor()
    if cluster.kind == "local" or (cluster.kind == "auto" and not controller_answers()):
        from hpc_train.launch.executors.local import LocalJobExecutor

        return LocalJobExecutor()
    if shutil.which("sbatch") is None:
        raise UserError(
            "sbatch is not on the PATH of this machine",
            where="cluster.kind",
            fix="submit from a login node, or cluster=local",
        )
    from hpc_train.launch.executors.slurm import SlurmJobExecutor

    return SlurmJobExecutor()


def in_allocation() -> bool:
    """Returns whether this process runs inside a Slurm job and can start steps in it."""
    return "SLURM_JOB_ID" in os.environ and shutil.which("srun") is not None


@cache
def controller_answers() -> bool:
    """Returns whether ``sbatch`` exists and a Slurm controller is up; cached per process."""
    return shutil.which("sbatch") is not None and controller_responds()
