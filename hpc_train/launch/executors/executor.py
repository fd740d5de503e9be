"""Defines the interface of executors, which run jobs on this machine or with a scheduler, and selects one."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from hpc_train.config.extensions import is_import_path
from hpc_train.config.schema import ClusterConfig, Config
from hpc_train.errors import UserError
from hpc_train.launch.job import Job
from hpc_train.layout.layout import JobShape
from hpc_train.schedulers.scheduler import JobStatus, load_scheduler
from hpc_train.schedulers.slurm.client import check_shell, in_allocation, uses_slurm


class Executor(Protocol):
    """Submits the jobs of one command, reports their status, and cancels them."""

    name: str

    def shape(self, config: Config) -> JobShape:
        """Returns the shape of a job with this config; for a range of nodes, with the largest number.

        Raises:
            UserError: the requested resources do not exist here, or ``elastic.min_nodes`` exceeds the number of nodes.
        """

    def at_once(self, jobs: Sequence[Job]) -> int:
        """Returns how many of ``jobs`` are submitted at the same time."""

    def check(self, jobs: Sequence[Job]) -> list[str]:
        """Checks ``jobs`` and returns lines with their resources and maximum cost. Writes nothing.

        Raises UserError if a job would be refused or would never start.
        """

    def earlier_starts(self, job: Job) -> list[str]:
        """Returns lines with changes of the config with which ``job`` would start earlier. May ask the scheduler."""

    def confirm(self, jobs: Sequence[Job], console: Console) -> None:
        """Asks the user for confirmation if ``jobs`` may cost much. Raises UserError if the user declines."""

    def plan(self, jobs: Sequence[Job], sweep: Path) -> list[tuple[str, str]]:
        """Returns the command line and batch script of each submission; empty if the executor submits no scripts."""

    def submit(self, jobs: Sequence[Job], sweep: Path, at_once: int) -> list[str]:
        """Submits ``jobs``, whose runs are frozen; returns their ids in order.

        At most ``at_once`` jobs of the directory ``sweep`` run at the same time. Raises UserError if the scheduler
        refuses them.
        """

    def identity(self, job_id: str) -> dict[str, Any]:
        """Returns the fields of a job in the run's record of submissions, by which a live run is recognized."""

    def statuses(self, ids: Collection[str]) -> dict[str, JobStatus]:
        """Returns the status of the jobs ``ids``; jobs that are no longer known are omitted."""

    def cancel(self, ids: Collection[str], *, save: bool = False) -> None:
        """Cancels jobs; with ``save``, and always on this machine, running jobs save a checkpoint first."""

    def output(self, job: Job, job_id: str) -> Path:
        """Returns the file with the output of the agent of the job."""


def select_executor(cluster: ClusterConfig) -> Executor:
    """Returns the executor for ``cluster.kind``; ``auto`` tries the surrounding allocation, then Slurm, then this
    machine.

    Raises UserError if Slurm is requested but ``sbatch`` is missing, or as ``check_shell``, ``uses_slurm`` and
    ``load_scheduler`` do.
    """
    if is_import_path(cluster.kind):
        from hpc_train.launch.executors.queue import QueueExecutor

        return QueueExecutor(load_scheduler(cluster.kind), cluster.kind)
    check_shell(cluster)
    if cluster.kind == "auto" and in_allocation():
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
