"""Selects the executor of jobs: the surrounding allocation, Slurm, or this machine; imports only the selected one."""

from __future__ import annotations

import shutil

from hpc_train.config.schema import ClusterConfig
from hpc_train.errors import UserError
from hpc_train.launch.executors.executor import Executor
from hpc_train.machine.allocation import refuse_components
from hpc_train.schedulers.slurm.here import check_shell, in_allocation, uses_slurm


def select_executor(cluster: ClusterConfig) -> Executor:
    """Returns the executor for ``cluster.kind``; ``auto`` tries the surrounding allocation, Slurm and this machine.

    Raises:
        UserError: Slurm is requested, and ``sbatch`` is missing; or as ``check_shell`` and ``uses_slurm``.
    """
    check_shell(cluster)
    if cluster.kind == "auto" and in_allocation():
        refuse_components()
        from hpc_train.launch.executors.allocation import AllocationExecutor

        return AllocationExecutor()
    if cluster.kind == "local" or (cluster.kind == "auto" and not uses_slurm()):
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
