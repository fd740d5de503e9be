"""How many GPUs per node a job asks Slurm for: ``cluster.gpus_per_node``, or what the nodes of its partition have."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hpc_train.cluster.site import NodeKind, Site, gpus_of
from hpc_train.config.errors import ConfigError
from hpc_train.config.schema import ClusterConfig

IN_EXTRA = ("gpus", "gpus_per_task", "gpus_per_socket")  # sbatch's other options for GPUs


@dataclass(frozen=True)
class AskedGpus:
    """GPUs per node; ``note``: what else was there to choose, and how."""

    count: int
    note: str | None = None


def asked_gpus(cluster: ClusterConfig, site: Site) -> AskedGpus:
    """The GPUs per node of a job. ``auto`` is what all nodes with GPUs of its partition have.

    Raises:
        ConfigError: no node has a GPU of ``cluster.gpu_type``, or ``cluster.extra`` asks for GPUs beside ``auto``.
    """
    asked = cluster.gpus_per_node
    if asked != "auto":
        return AskedGpus(asked if isinstance(asked, int) else 0)
    _check_extra(cluster)
    if named := gpus_of(cluster.gres or ""):
        return AskedGpus(sum(named.values()))
    partition = cluster.partition or _of_environment()
    where = f"the partition {partition}" if partition else "the default partition"
    kinds = _kinds(cluster, partition, site)
    if not kinds:
        unknown = f"note: the GPUs of the nodes of {where} are not known here, none is asked for"
        return AskedGpus(0, f"{unknown}; cluster.gpus_per_node=N asks for N per node")
    having = [kind for kind in kinds if kind.gpus_of(cluster.gpu_type)]
    if cluster.gpu_type and not having:
        types = sorted({name for kind in kinds for name in kind.gpus if name})
        raise ConfigError(
            f"nodes of {where} have no GPUs of type {cluster.gpu_type}",
            where="cluster.gpu_type",
            mend=f"types here: {', '.join(types)}" if types else "cluster.gpu_type=null, or another cluster.partition",
        )
    counts = sorted({kind.gpus_of(cluster.gpu_type) for kind in having})
    note = _note(where, kinds if cluster.gpu_type is None else having, having, counts)
    return AskedGpus(counts[0] if counts else 0, note)


def _note(where: str, kinds: list[NodeKind], having: list[NodeKind], counts: list[int]) -> str | None:
    """What there was to choose among ``kinds``, of which those in ``having`` have ``counts`` GPUs."""
    said = []
    if len(counts) > 1:
        said.append(
            f"nodes of {where} have {', '.join(map(str, counts[:-1]))} or {counts[-1]} GPUs: {counts[0]} per node are"
            f" asked for; cluster.gpus_per_node={counts[-1]} takes only nodes with as many"
        )
    with_gpus, nodes = (sum(kind.count for kind in some) for some in (having, kinds))
    if 0 < with_gpus < nodes:
        said.append(
            f"{with_gpus} of the {nodes} nodes of {where} have GPUs, the job runs on these; cluster.gpus_per_node=0"
            " trains on the CPUs of any node"
        )
    return f"note: {'; '.join(said)}" if said else None


def _of_environment() -> str | None:
    """The partition that sbatch takes without --partition; a job's own variables are not handed down to it."""
    return None if "SLURM_JOB_ID" in os.environ else os.environ.get("SBATCH_PARTITION")


def _kinds(cluster: ClusterConfig, partition: str | None, site: Site) -> list[NodeKind]:
    """The nodes that the job may get; none where they are not known."""
    if cluster.clusters is not None:
        return []  # another cluster's nodes
    partitions = [site.partition(name or None) for name in (partition or "").split(",")]
    kinds = [kind for each in partitions if each is not None for kind in each.kinds]
    return [kind for kind in kinds if kind.meets(cluster.constraint)] or kinds  # sbatch refuses what no node meets


def _check_extra(cluster: ClusterConfig) -> None:
    for name in cluster.extra:
        if name.replace("-", "_") in IN_EXTRA:
            raise ConfigError(
                f"sbatch's option {name} in cluster.extra asks for GPUs, and so does cluster.gpus_per_node=auto",
                where="cluster.extra",
                mend=f"leave {name} out: cluster.gpus_per_node=N asks for N per node",
            )
