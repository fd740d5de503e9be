"""The contract of what takes jobs: this machine or Slurm. Everything else about launching is the same for both."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from hpc_train.cluster.allocation import workers_per_node
from hpc_train.config.cluster_size import node_range
from hpc_train.config.errors import ConfigError
from hpc_train.config.schema import ClusterConfig
from hpc_train.launch.job import Job
from hpc_train.launch.standing import Standing


class Submitter(Protocol):
    """Submits jobs, knows which are still there, and can ask them to stop."""

    name: str

    def shape(self, cluster: ClusterConfig) -> tuple[int, int, int]:
        """Nodes (the most, of a range), GPUs per node and workers per node that a job gets.

        Raises:
            ConfigError: this place cannot give what is asked for.
        """

    def at_once(self, jobs: Sequence[Job]) -> int:
        """How many of ``jobs`` are to be there (waiting or running) at the same time."""

    def check(self, jobs: Sequence[Job]) -> list[str]:
        """Lines that say what ``jobs`` ask for and may cost. Writes nothing.

        Raises:
            ConfigError: this place would refuse one of them, or never start it.
        """

    def confirm(self, jobs: Sequence[Job], console: Console) -> None:
        """Asks the person at the terminal where ``jobs`` may cost much.

        Raises:
            ConfigError: they are not to be submitted.
        """

    def plan(self, jobs: Sequence[Job], sweep: Path) -> list[tuple[str, str]]:
        """Command line and batch script of each submission; nothing where no script is submitted."""

    def submit(self, jobs: Sequence[Job], sweep: Path, at_once: int) -> list[str]:
        """Submits ``jobs``, whose runs are frozen; returns their ids in order.

        ``at_once`` is that of all jobs of the directory ``sweep``.

        Raises:
            ConfigError: the scheduler refuses them.
        """

    def identity(self, job_id: str) -> dict[str, Any]:
        """What ``run.submissions.add`` is told of a job, so that a live run is known as such."""

    def standings(self, ids: Collection[str]) -> dict[str, Standing]:
        """How ``ids`` stand; those that are not known here any more are left out."""

    def stop(self, ids: Collection[str]) -> None:
        """Asks jobs to save and stop."""

    def cancel(self, ids: Collection[str]) -> None:
        """Ends jobs for good; a place where a stop is quick lets them save."""

    def stop_command(self, ids: Collection[str]) -> str:
        """The command by which a person does the same."""

    def output(self, job: Job, job_id: str) -> Path:
        """The file with the standard error of the job's agent."""


def local_shape(cluster: ClusterConfig) -> tuple[int, int, int]:
    """Nodes, GPUs and workers of a job on this machine.

    Raises:
        ConfigError: more nodes or GPUs are asked for than this machine has.
    """
    if node_range(cluster) != (1, 1):
        raise ConfigError(
            f"{cluster.nodes} nodes are asked for, and this machine is one",
            where="cluster.nodes",
            mend="cluster.nodes=1, or submit where sbatch is",
        )
    return (1, *workers_per_node(cluster))
