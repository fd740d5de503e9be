"""The GPUs per node that a job requests from Slurm, and the GPUs that the steps of the surrounding job get.

A step inherits the GPUs that its job requests, but not those that the job has only through ``--exclusive``. Such a step
gets GPUs by ``--gpus-per-node``, or by ``SLURM_GPUS_PER_NODE``, which ``srun`` reads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from hpc_train.config.schema import ClusterConfig, Config
from hpc_train.errors import UserError
from hpc_train.layout.resolve import open_keys
from hpc_train.machine.gpus import gpu_memory, gpu_names
from hpc_train.schedulers.slurm.client import own_job, show_job
from hpc_train.schedulers.slurm.records import JobRecord, gpus_of
from hpc_train.schedulers.slurm.site import MIG, NodeKind, Site, other_clusters
from hpc_train.schedulers.slurm.variables import preset

IN_EXTRA = ("gpus", "gpus_per_task", "gpus_per_socket")  # sbatch's other options for GPUs


@dataclass(frozen=True)
class AskedGpus:
    """GPUs per node. ``note`` names the alternatives and how to choose them."""

    count: int
    note: str | None = None


def asked_gpus(cluster: ClusterConfig, site: Site) -> AskedGpus:
    """Returns the GPUs per node of a job. ``auto`` is the number that all nodes with GPUs in its partition have.

    Raises:
        UserError: no node has a GPU of ``cluster.gpu_type``, or ``cluster.extra`` requests GPUs besides ``auto``.
    """
    asked = cluster.gpus_per_node
    if asked != "auto":
        return AskedGpus(asked if isinstance(asked, int) else 0)
    _check_extra(cluster)
    if named := gpus_of(cluster.gres or ""):
        return AskedGpus(sum(named.values()))
    partition = cluster.partition or preset("partition")
    where = f"the partition {partition}" if partition else "the default partition"
    kinds = _kinds(cluster, partition, site)
    if not kinds:
        unknown = f"note: the GPUs of the nodes of {where} are unknown, so none is requested"
        return AskedGpus(0, f"{unknown}; cluster.gpus_per_node=N requests N per node")
    having = [kind for kind in kinds if kind.gpus_of(cluster.gpu_type)]
    if cluster.gpu_type and not having:
        types = sorted({name for kind in kinds for name in kind.gpus if name})
        raise UserError(
            f"nodes of {where} have no GPUs of type {cluster.gpu_type}",
            where="cluster.gpu_type",
            fix=f"types here: {', '.join(types)}" if types else "cluster.gpu_type=null, or another cluster.partition",
        )
    if any(kind.slices_of(cluster.gpu_type) for kind in having):
        return _beside_slices(cluster, where, having)
    counts = sorted({kind.gpus_of(cluster.gpu_type) for kind in having})
    note = _note(where, kinds if cluster.gpu_type is None else having, having, counts)
    return AskedGpus(counts[0] if counts else 0, note)


def _beside_slices(cluster: ClusterConfig, where: str, having: list[NodeKind]) -> AskedGpus:
    """Returns the GPUs per node where some are MIG slices: the whole ones, or a single slice."""
    whole = sorted({name for kind in having for name in kind.gpus if not MIG.search(name) and not cluster.gpu_type})
    counts = [kind.gpus_of(None) - kind.slices_of(None) for kind in having] if whole else [1]
    count = min(each for each in counts if each)
    reason = f"note: nodes of {where} have MIG slices, of which NCCL cannot connect two of one GPU"
    if not whole:
        return AskedGpus(count, f"{reason}: 1 per node is requested")
    types = " or ".join(f"cluster.gpu_type={name}" for name in whole if name) or "cluster.gpu_type"
    return AskedGpus(
        count, f"{reason}: {count} per node are requested, and {types} makes sure that they are whole GPUs"
    )


def _note(where: str, kinds: list[NodeKind], having: list[NodeKind], counts: list[int]) -> str | None:
    """Describes the alternatives among ``kinds``, of which those in ``having`` have ``counts`` GPUs."""
    notes = []
    if len(counts) > 1:
        notes.append(
            f"nodes of {where} have {', '.join(map(str, counts[:-1]))} or {counts[-1]} GPUs: {counts[0]} per node are"
            f" requested; cluster.gpus_per_node={counts[-1]} selects the nodes with as many"
        )
    types = sorted({name for kind in having for name in kind.gpus if name})
    if len(types) > 1 and len({frozenset(kind.gpus) for kind in having}) > 1:
        notes.append(
            f"nodes of {where} have GPUs of type {', '.join(types[:-1])} or {types[-1]}, and the job may get any;"
            f" cluster.gpu_type={types[0]} selects one type"
        )
    with_gpus, nodes = (sum(kind.count for kind in some) for some in (having, kinds))
    if 0 < with_gpus < nodes:
        notes.append(
            f"{with_gpus} of the {nodes} nodes of {where} have GPUs, and the job runs on these;"
            " cluster.gpus_per_node=0 trains on the CPUs of any node"
        )
    return f"note: {'; '.join(notes)}" if notes else None


def _kinds(cluster: ClusterConfig, partition: str | None, site: Site) -> list[NodeKind]:
    """Returns the kinds of nodes that the job may get; empty if they are unknown."""
    if other_clusters(cluster.clusters, site) is not None:
        return []  # another cluster's nodes
    partitions = [site.partition(name or None) for name in (partition or "").split(",")]
    kinds = [kind for each in partitions if each is not None for kind in each.kinds]
    return [kind for kind in kinds if kind.meets(cluster.constraint)] or kinds  # sbatch refuses what no node meets


def _check_extra(cluster: ClusterConfig) -> None:
    for name in cluster.extra:
        if name.replace("-", "_") in IN_EXTRA:
            raise UserError(
                f"sbatch's option {name} in cluster.extra requests GPUs, and so does cluster.gpus_per_node=auto",
                where="cluster.extra",
                fix=f"remove {name}; cluster.gpus_per_node=N requests N per node",
            )


# Bash, because a batch script runs outside of containers and may have no Python. Of the tasks of an array,
# `scontrol show job` prints only the one that is named by both of its numbers.
EXPORT = r"""
# The agent is the only task of its node and uses all GPUs that the job has there, also if the script requests resources
# for one task per GPU.
unset SLURM_GPU_BIND SLURM_NTASKS_PER_GPU
tasks=one
if [ "${SLURM_NTASKS_PER_NODE:-1}" -gt 1 ] || [ "${SLURM_NTASKS:-0}" -gt "${SLURM_JOB_NUM_NODES:-1}" ]; then
  unset SLURM_GPUS_PER_TASK
  tasks=several
fi
# A step inherits the GPUs that its job requests per job, node or socket, but neither those that the job requests for
# several tasks of a node, nor those that it has only through --exclusive. To get these, the step requests as many per
# node as every node of the job has.
if [ -z "${SLURM_GPUS:-}${SLURM_GPUS_PER_NODE:-}${SLURM_GPUS_PER_TASK:-}" ]; then
  job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}
  job=$(scontrol show job --details "$job" 2> /dev/null) || true
  [ "$tasks" = one ] || job=${job//TresPerTask=/}
  if ! grep -q 'TresPer[A-Za-z]*=[^ ]*gpu' <<< "$job"; then
    gpus=$(sed -n 's/(IDX:[^)]*)//g; s/^ *Nodes=.* GRES=//p' <<< "$job" | awk -F, '
      { n = 0; for (i = 1; i <= NF; i++) if ($i ~ /^gpu:/) { parts = split($i, part, ":"); n += part[parts] } }
      NR == 1 || n < fewest { fewest = n }
      END { if (NR) print fewest }')
    # if scontrol does not respond, use the number of the batch host
    gpus=${gpus:-${SLURM_GPUS_ON_NODE:-$(awk -F, '{ print NF }' <<< "${SLURM_JOB_GPUS:-}")}}
    if [ "$gpus" -gt 0 ]; then export SLURM_GPUS_PER_NODE=$gpus; fi
  fi
fi
""".strip()


@dataclass(frozen=True)
class JobGpus:
    """The GPUs that a step of the job gets on each node.

    Attributes:
        per_node: the number that the job requests, or that of the node with the fewest. 0 if the job has none, or it is
            unknown.
        inherited: the job requests them, so its steps have them without an option.
    """

    per_node: int
    inherited: bool

    def srun_options(self, wanted: int) -> list[str]:
        """Returns the options of ``srun`` with which a step gets ``wanted`` GPUs on each node."""
        return [] if self.inherited or not self.per_node or not wanted else [f"--gpus-per-node={wanted}"]


def gpu_export_lines() -> list[str]:
    """Returns bash lines with which every ``srun`` in a batch script gets the GPUs of its job."""
    return EXPORT.splitlines()


def has_several_tasks(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether the surrounding job requests several tasks per node, e.g. one per GPU.

    An agent is the only task of its node: it needs the GPUs and cores of all of them.
    """
    per_node, tasks = environment.get("SLURM_NTASKS_PER_NODE", "1"), environment.get("SLURM_NTASKS", "0")
    return int(per_node) > 1 or int(tasks) > int(environment.get("SLURM_JOB_NUM_NODES", "1"))


def gpus_of_this_job(environment: Mapping[str, str] = os.environ) -> JobGpus:
    """Returns the GPUs of the surrounding job. Slurm is asked, since salloc's shell may run outside of its nodes."""
    several = has_several_tasks(environment)
    for name in ("SLURM_GPUS_PER_NODE", *(() if several else ("SLURM_GPUS_PER_TASK",))):
        if name in environment:
            return JobGpus(_count(environment[name]), True)
    job = _show_job(own_job(environment), environment.get("PATH"))
    asked = {name: tres for name, tres in job.tres.items() if "gpu" in tres and not (several and name == "TresPerTask")}
    inherited = bool(asked) or "SLURM_GPUS" in environment
    per_node = asked.get("TresPerNode") or asked.get("TresPerTask")
    if per_node is not None:
        return JobGpus(_count(per_node), inherited)
    nodes = [sum(gpus_of(gres).values()) for gres in job.node_gres]
    return JobGpus(min(nodes) if nodes else _on_batch_host(environment), inherited)


def _on_batch_host(environment: Mapping[str, str]) -> int:
    count = environment.get("SLURM_GPUS_ON_NODE")
    return int(count) if count else len([name for name in environment.get("SLURM_JOB_GPUS", "").split(",") if name])


@cache
def _show_job(job_id: str, path: str | None) -> JobRecord:
    """Asks Slurm for the job, once per process and ``path``, in which ``scontrol`` is found."""
    return show_job(job_id, "--details")


def _count(asked: str) -> int:
    """GPUs in ``4``, ``a100:4``, ``gres:gpu:a100:4``, ``gres/gpu:4,gres/nvme:1``, ``cpu=1,gres/gpu=4``."""
    parts = asked.split(",")
    counts = [re.split("[:=]", part)[-1] for part in parts if "gpu" in part or "gpu" not in asked]
    return sum(int(count) if count.isdigit() else 1 for count in counts)


def asked_gpu_memory(cluster: ClusterConfig, site: Site) -> float | None:
    """Returns the memory of the smallest GPU that a job may get, by the types that the site names; None if unknown."""
    sizes = [gpu_memory(name) for name in _asked_types(cluster, site)]
    known = [size for size in sizes if size is not None]
    return min(known) if known and len(known) == len(sizes) else None


def asked_gpu_types(cluster: ClusterConfig, site: Site) -> frozenset[str]:
    """Returns the types of GPUs that a job may get, as the site names them; empty if one of them is unknown."""
    types = _asked_types(cluster, site)
    return frozenset() if "" in types else frozenset(types)


def _asked_types(cluster: ClusterConfig, site: Site) -> set[str]:
    """Returns the types of GPUs that a job may get; ``""`` is a type without a name."""
    types = {cluster.gpu_type} if cluster.gpu_type else set(gpus_of(cluster.gres or "")) - {""}
    if types:
        return types
    partition = cluster.partition or preset("partition")
    return {name for kind in _kinds(cluster, partition, site) for name in kind.gpus}


def depends_on_gpu_types(config: Config, gpus: int) -> bool:
    """Returns whether the layout or the checks of ``config`` depend on the types of the ``gpus`` GPUs of a node."""
    return gpus > 0 and (config.precision.fp8 is not None or bool(open_keys(config)))


def gpu_types_here(cluster: ClusterConfig) -> frozenset[str]:
    """Returns the types of the GPUs of this machine, or the type that the config names; empty if it is unknown."""
    return frozenset({cluster.gpu_type}) if cluster.gpu_type else gpu_names()
