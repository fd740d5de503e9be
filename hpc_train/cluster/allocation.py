"""What this process was given: the nodes of its Slurm step, or this one machine; and the workers of a node."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_train.cluster.hostlist import expand
from hpc_train.cluster.usable_gpus import gpus_to_use
from hpc_train.config.errors import ConfigError
from hpc_train.config.schema import ClusterConfig

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Allocation:
    """Where this process stands among the nodes of its job.

    Attributes:
        job_id: of the scheduler; None without one.
        launch_id: the same for all nodes of one start of a job, different at the next start.
        address: where the other nodes reach this one; loopback where there is only one.
        node_names: of all nodes, in the order of their numbers.
    """

    nodes: int
    node_rank: int
    node_name: str
    job_id: str | None
    launch_id: str
    address: str
    node_names: tuple[str, ...] = ()


def current_allocation(environment: Mapping[str, str] = os.environ) -> Allocation:
    """Reads the Slurm step that this process is a task of; any other process has one node, its own."""
    if "SLURM_STEP_NUM_NODES" not in environment or "SLURM_NODEID" not in environment:
        return _one_node(environment)
    nodes = int(environment["SLURM_STEP_NUM_NODES"])
    # several slurmd of a test cluster share one host name: Slurm's own name tells the nodes apart
    name = environment.get("SLURMD_NODENAME", socket.gethostname())
    job_id = environment["SLURM_JOB_ID"]
    parts = (job_id, environment.get("SLURM_STEP_ID", "0"), environment.get("SLURM_RESTART_COUNT", "0"))
    return Allocation(
        nodes=nodes,
        node_rank=int(environment["SLURM_NODEID"]),
        node_name=name,
        job_id=job_id,
        launch_id=".".join(parts),
        address=LOOPBACK if nodes == 1 else name,
        node_names=tuple(expand(environment.get("SLURM_STEP_NODELIST", name))),
    )


def _one_node(environment: Mapping[str, str]) -> Allocation:
    name = socket.gethostname()
    job_id = environment.get("SLURM_JOB_ID") or environment.get("SUBMITIT_LOCAL_JOB_ID")
    return Allocation(1, 0, name, job_id, f"{name}.{os.getpid()}", LOOPBACK, (name,))


def workers_per_node(cluster: ClusterConfig, visible: int | None = None) -> tuple[int, int]:
    """GPUs and workers of a node: one worker per GPU, ``cpu_workers`` of them where there is no GPU.

    ``visible`` stands for the GPUs of the node where it is not this machine that will run the job.

    Raises:
        ConfigError: more GPUs are asked for than are there. On this machine also ``UnusableGpus``: this process cannot
            use those that are there.
    """
    asked = cluster.gpus_per_node
    if asked == 0:
        return 0, cluster.cpu_workers
    if asked != "auto" and (not isinstance(asked, int) or asked < 0):
        raise ConfigError(f"gpus_per_node is {asked!r}", where="cluster.gpus_per_node", mend="a number >= 0, or auto")
    there = gpus_to_use(asked) if visible is None else visible
    if not isinstance(asked, int):
        return (there, there) if there else (0, cluster.cpu_workers)
    if asked > there:
        raise ConfigError(
            f"{asked} GPUs per node are asked for, {there} are visible here",
            where="cluster.gpus_per_node",
            mend=f"cluster.gpus_per_node={there} (0 trains on the CPU), or auto; CUDA_VISIBLE_DEVICES hides GPUs too",
        )
    return asked, asked
