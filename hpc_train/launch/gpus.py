"""Determines the GPUs per node that a job requests from Slurm, and the GPUs that the steps of the surrounding job get.

A step inherits the GPUs that its job requests, but not the GPUs that the job has only through ``--exclusive``. A step
gets those with ``--gpus-per-node``, or with ``SLURM_GPUS_PER_NODE``, which ``srun`` reads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from hpc_train.config.schema import ClusterConfig, Config
from hpc_train.errors import UserError
from hpc_train.layout.resolve import open_keys
from hpc_train.machine.gpus import gpu_memory, gpu_names
from hpc_train.schedulers.slurm.client import asked_once, own_job, show_job
from hpc_train.schedulers.slurm.records import gpus_of
from hpc_train.schedulers.slurm.site import MIG, NodeKind, Site, other_clusters
from hpc_train.schedulers.slurm.variables import preset

IN_EXTRA = ("gpus", "gpus_per_task", "gpus_per_socket")  # other sbatch options that request GPUs


@dataclass(frozen=True)
class AskedGpus:
    """The requested GPUs per node. ``note`` names the alternatives and how to choose them."""

    count: int
    note: str | None = None


def asked_gpus(cluster: ClusterConfig, site: Site) -> AskedGpus:
    """Returns the GPUs per node of a job. ``auto`` means the number that every node with GPUs in its partition has.

    Raises UserError if no node has a GPU of ``cluster.gpu_type``, or ``cluster.extra`` requests GPUs besides ``auto``.
    """
    if isinstance(cluster.gpus_per_node, int):
        return AskedGpus(cluster.gpus_per_node)
    for name in cluster.extra:
        if name.replace("-", "_") in IN_EXTRA:
            raise UserError(
                f"the sbatch option {name} in cluster.extra requests GPUs, and so does cluster.gpus_per_node=auto",
                where="cluster.extra",
                fix=f"remove {name}; cluster.gpus_per_node=N requests N per node",
            )
    if gres := gpus_of(cluster.gres or ""):
        return AskedGpus(sum(gres.values()))
    gpu_type = cluster.gpu_type
    partition = cluster.partition or preset("partition")
    where = f"the partition {partition}" if partition else "the default partition"
    kinds = _kinds(cluster, site)
    if not kinds:
        unknown = f"note: the GPUs of the nodes of {where} are unknown, so none is requested"
        return AskedGpus(0, f"{unknown}; cluster.gpus_per_node=N requests N per node")
    with_gpus = [kind for kind in kinds if kind.gpus_of(gpu_type)]
    if gpu_type and not with_gpus:
        types = sorted({name for kind in kinds for name in kind.gpus if name})
        raise UserError(
            f"nodes of {where} have no GPUs of type {gpu_type}",
            where="cluster.gpu_type",
            fix=f"types here: {', '.join(types)}" if types else "cluster.gpu_type=null, or another cluster.partition",
        )
    if any(kind.slices_of(gpu_type) for kind in with_gpus):
        return _beside_slices(cluster, where, with_gpus)
    counts = sorted({kind.gpus_of(gpu_type) for kind in with_gpus})
    notes = []
    if len(counts) > 1:
        notes.append(
            f"nodes of {where} have {', '.join(map(str, counts[:-1]))} or {counts[-1]} GPUs: {counts[0]} per node are"
            f" requested; cluster.gpus_per_node={counts[-1]} selects the nodes that have {counts[-1]}"
        )
    types = sorted({name for kind in with_gpus for name in kind.gpus if name})
    if len(types) > 1 and len({frozenset(kind.gpus) for kind in with_gpus}) > 1:
        notes.append(
            f"nodes of {where} have GPUs of type {', '.join(types[:-1])} or {types[-1]}, and the job may get any;"
            f" cluster.gpu_type={types[0]} selects one type"
        )
    suitable = sum(kind.count for kind in with_gpus)
    nodes = sum(kind.count for kind in kinds)
    if gpu_type is None and 0 < suitable < nodes:
        notes.append(
            f"{suitable} of the {nodes} nodes of {where} have GPUs, and the job runs on these;"
            " cluster.gpus_per_node=0 trains on the CPUs of any node"
        )
    return AskedGpus(min(counts, default=0), f"note: {'; '.join(notes)}" if notes else None)


def _beside_slices(cluster: ClusterConfig, where: str, with_gpus: list[NodeKind]) -> AskedGpus:
    """Returns the GPUs per node of a partition with MIG slices: the number of full GPUs, or a single slice."""
    note = f"note: nodes of {where} have MIG slices, and NCCL cannot connect two slices of one GPU"
    types = sorted({name for kind in with_gpus for name in kind.gpus if not MIG.search(name)})
    if cluster.gpu_type or not types:
        return AskedGpus(1, f"{note}: 1 per node is requested")
    counts = [kind.gpus_of(None) - kind.slices_of(None) for kind in with_gpus]
    count = min(filter(None, counts))
    keys = " or ".join(f"cluster.gpu_type={name}" for name in types if name) or "cluster.gpu_type"
    return AskedGpus(count, f"{note}: {count} per node are requested, and {keys} ensures that they are full GPUs")


def _kinds(cluster: ClusterConfig, site: Site) -> list[NodeKind]:
    """Returns the kinds of nodes that the job may get; empty if they are unknown."""
    if other_clusters(cluster.clusters, site) is not None:
        return []  # another cluster's nodes
    names = (cluster.partition or preset("partition") or "").split(",")
    partitions = [site.partition(name or None) for name in names]
    kinds = [kind for partition in partitions if partition is not None for kind in partition.kinds]
    return [kind for kind in kinds if kind.meets(cluster.constraint)] or kinds  # sbatch refuses what no node meets


# The lines give every ``srun`` in a batch script the GPUs of its job.
# This is bash, because a batch script runs outside of containers and may have no Python. `scontrol show job` prints a
# single task of an array only if it gets the id of the array and the index of the task.
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
        per_node: the number that the job requests, or else the number on the node with the fewest. 0 if the job has no
            GPUs, or the number is unknown.
        inherited: whether the job requests them explicitly, so that its steps get them without an option.
    """

    per_node: int
    inherited: bool

    def srun_options(self, count: int) -> list[str]:
        """Returns the ``srun`` options that give a step ``count`` GPUs on each node."""
        if self.inherited or not self.per_node or not count:
            return []
        return [f"--gpus-per-node={count}"]


def has_several_tasks(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether the surrounding job requests several tasks per node, e.g. one per GPU.

    An agent is the only task of its node: it needs the GPUs and cores of all of them.
    """
    if int(environment.get("SLURM_NTASKS_PER_NODE", "1")) > 1:
        return True
    return int(environment.get("SLURM_NTASKS", "0")) > int(environment.get("SLURM_JOB_NUM_NODES", "1"))


def gpus_of_this_job(environment: Mapping[str, str] = os.environ) -> JobGpus:
    """Returns the GPUs of the surrounding job. This queries Slurm, because the shell of salloc may run outside of the
    allocated nodes."""
    several = has_several_tasks(environment)
    for name in ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK"):
        if name in environment and not (several and name == "SLURM_GPUS_PER_TASK"):
            return JobGpus(_count(environment[name]), True)
    job = _show_job_once(own_job(environment), "--details")
    tres = {name: text for name, text in job.tres.items() if "gpu" in text and not (several and name == "TresPerTask")}
    inherited = bool(tres) or "SLURM_GPUS" in environment
    per_node = tres.get("TresPerNode") or tres.get("TresPerTask")
    if per_node is not None:
        return JobGpus(_count(per_node), inherited)
    if job.node_gres:
        return JobGpus(min(sum(gpus_of(gres).values()) for gres in job.node_gres), inherited)
    on_batch_host = environment.get("SLURM_GPUS_ON_NODE")
    if on_batch_host:
        return JobGpus(int(on_batch_host), inherited)
    return JobGpus(len(list(filter(None, environment.get("SLURM_JOB_GPUS", "").split(",")))), inherited)


_show_job_once = asked_once(show_job)


def _count(request: str) -> int:
    """Parses GPU counts: ``4``, ``a100:4``, ``gres:gpu:a100:4``, ``gres/gpu:4,gres/nvme:1``, ``cpu=1,gres/gpu=4``."""
    counts = [re.split("[:=]", part)[-1] for part in request.split(",") if "gpu" in part or "gpu" not in request]
    return sum(int(count) if count.isdigit() else 1 for count in counts)


def asked_gpu_memory(cluster: ClusterConfig, site: Site) -> float | None:
    """Returns the bytes of memory of the smallest GPU type that a job may get; None if the memory of a type is
    unknown."""
    sizes = [gpu_memory(name) for name in _asked_types(cluster, site)]
    return None if None in sizes else min(filter(None, sizes), default=None)


def asked_gpu_types(cluster: ClusterConfig, site: Site) -> frozenset[str]:
    """Returns the types of GPUs that a job may get, as the site names them; empty if one of them is unknown."""
    types = _asked_types(cluster, site)
    return frozenset() if "" in types else frozenset(types)


def _asked_types(cluster: ClusterConfig, site: Site) -> set[str]:
    """Returns the types of GPUs that a job may get; ``""`` is a type without a name."""
    types = {cluster.gpu_type} if cluster.gpu_type else set(gpus_of(cluster.gres or "")) - {""}
    if types:
        return types
    return {name for kind in _kinds(cluster, site) for name in kind.gpus}


def depends_on_gpu_types(config: Config, gpus: int) -> bool:
    """Returns whether the layout, the checks or the notices of ``config`` depend on the types of the ``gpus`` GPUs of a
    node.
    """
    is_slow = config.precision.name == "fp32" or not config.train.compile
    needs_kernels = config.precision.fp8 is not None or config.train.attention != "auto"
    return gpus > 0 and (is_slow or needs_kernels or bool(open_keys(config)))


def gpu_types_here(cluster: ClusterConfig) -> frozenset[str]:
    """Returns the types of the GPUs of this machine, or the type that the config names; empty if it is unknown."""
    return frozenset({cluster.gpu_type}) if cluster.gpu_type else _gpu_names()


_gpu_names = lru_cache(maxsize=1)(gpu_names)  # it starts nvidia-smi, so it is called once per sweep
