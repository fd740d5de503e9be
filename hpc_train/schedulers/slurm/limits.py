"""Computes the cores and the memory that a job requests, and checks the job against the limits of the site.

Jobs are checked before submission, since many sites accept jobs that never start. An unknown limit refuses no job. Each
error names the limit and the fix. If several limits are set, the first in the order of
https://slurm.schedmd.com/resource_limits.html applies.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from hpc_train.config.schema import Config
from hpc_train.config.values import asked_nodes
from hpc_train.errors import UserError, nearest
from hpc_train.schedulers.slurm.records import clock, seconds
from hpc_train.schedulers.slurm.site import (
    MIG,
    Association,
    NodeKind,
    Partition,
    PartitionLimits,
    Site,
    other_clusters,
)
from hpc_train.schedulers.slurm.variables import preset
from hpc_train.units import counted


class JobRequest(Protocol):
    """Interface of a job whose resources are requested.

    Attributes:
        gpus: the number of GPUs per node.
        workers: the number of workers per node.
    """

    @property
    def config(self) -> Config: ...

    @property
    def gpus(self) -> int: ...

    @property
    def workers(self) -> int: ...


def cores(job: JobRequest, partition: Partition | None) -> int | None:
    """Returns the cores per node; None on exclusive nodes, where the job gets all cores.

    Without the option for cores, a task on a shared node gets one core.
    """
    per_rank = job.config.cluster.cpus_per_gpu
    if isinstance(per_rank, int):
        return per_rank * max(job.gpus, job.workers)
    if job.config.cluster.exclusive:
        return None
    if not job.gpus or partition is None:
        return job.workers
    if partition.cores_per_gpu is not None:
        return partition.cores_per_gpu * job.gpus
    shares = [kind.cores * job.gpus // kind.gpus_of(None) for kind in _with_gpus(job, partition)]
    return max(min(shares, default=job.workers), job.workers)


def memory(job: JobRequest, partition: Partition | None) -> str | None:
    """Returns the memory per node; None for the default of the partition."""
    cluster = job.config.cluster
    if cluster.mem is not None:
        return cluster.mem
    if cluster.mem_per_gpu != "auto":
        size = re.fullmatch(r"(\d+)([KMGT]?)", cluster.mem_per_gpu, re.IGNORECASE)
        if size is None:
            raise UserError(
                f"cluster.mem_per_gpu is {cluster.mem_per_gpu!r}, not a size",
                where="cluster.mem_per_gpu",
                fix="64G (K, M, G or T), or auto",
            )
        return f"{int(size[1]) * max(job.gpus, job.workers)}{size[2]}"
    if cluster.exclusive:
        return "0"  # all memory of the node
    if not job.gpus or partition is None or partition.memory_default:
        return None
    shares = [kind.memory_mb * job.gpus // kind.gpus_of(None) for kind in _with_gpus(job, partition)]
    return f"{min(shares)}M" if shares else None


def _with_gpus(job: JobRequest, partition: Partition) -> list[NodeKind]:
    """Returns the kinds of nodes that have the GPUs of the job."""
    return [kind for kind in partition.kinds if kind.gpus_of(job.config.cluster.gpu_type) >= job.gpus]


SIZE_MB = re.compile(r"(\d+)([KMGT]?)B?", re.IGNORECASE)  # sbatch --mem
UNIT_MB = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}
FALLBACK_QOS = "normal"  # for jobs without a QOS whose association has several QOS and no default

NamedLimits = tuple[str, PartitionLimits]  # with the name of the QOS or account that sets them


def check_limits(job: JobRequest, site: Site) -> None:
    """Raises UserError if the job can never start on ``site``."""
    if other_clusters(job.config.cluster.clusters, site) is not None:
        return  # the limits of another cluster are unknown here; sbatch checks them
    partition = _partition(job, site)
    association = _association(job, site, partition)
    _check_qos(job, site, association)
    flags = _flags(_qos(job, association), site)
    if partition is not None:
        _check_access(job, partition, association)
        most_nodes = partition.nodes or None
        if partition.max_nodes is not None and "PartitionMaxNodes" not in flags:
            most_nodes = min(partition.max_nodes, most_nodes or partition.max_nodes)
        fewest = asked_nodes(job.config)[0]
        if most_nodes is not None and fewest > most_nodes:
            verb = "has" if most_nodes == partition.nodes else "allows"
            raise UserError(
                f"{fewest} nodes are requested, but partition {partition.name} {verb} {most_nodes}",
                where="cluster.nodes",
                fix=f"cluster.nodes={most_nodes} or fewer, or another cluster.partition",
            )
        if partition.kinds and not partition.hides_nodes:
            _check_gpus(job, partition)
            _check_cores_and_memory(job, partition)
    limits = _limits(job, site, partition, association)
    _check_time(job, limits, None if "PartitionTimeLimit" in flags else partition)
    _check_size(job, limits)


def check_queue(jobs: Sequence[JobRequest], site: Site) -> None:
    """Raises UserError if more jobs are submitted than the user may have in the queue."""
    job = jobs[0]
    if other_clusters(job.config.cluster.clusters, site) is not None:
        return
    count = sum(item.config.launch.chain for item in jobs)
    if job.config.launch.chain <= 1:
        count += sum(len(item.config.cluster.first) for item in jobs)
    partition = _partition(job, site)
    limits = _limits(job, site, partition, _association(job, site, partition))
    for source, most in _first(limits, "max_jobs"):
        if count > most:
            raise UserError(
                f"{count} jobs are submitted, but {source} allows {most} in the queue",
                where="the command line",
                fix=f"submit sweeps of at most {most} jobs, one after the other",
            )


def _set_by(job: JobRequest, key: str) -> str:
    """Returns what sets an option of the job: a key of ``cluster``, or a variable of the shell."""
    if getattr(job.config.cluster, key) is None and preset(key) is not None:
        return f"SBATCH_{key.upper()} of this shell"
    return f"cluster.{key}"


def _partition(job: JobRequest, site: Site) -> Partition | None:
    """Returns the partition of the job; None if it is unknown, or if Slurm selects one of several."""
    name = _requested(job, "partition")
    if not site.partitions:
        return None
    where = _set_by(job, "partition")
    names = (name or "").split(",")
    unknown = [name for name in names if name and name not in site.partitions]
    if unknown:
        raise UserError(
            f"partition {unknown[0]!r} does not exist on {site.name or 'this cluster'}",
            where=where,
            fix=nearest(unknown[0], sorted(site.partitions)),
        )
    if len(names) > 1:
        return None  # Slurm uses the one in which the job starts first
    partition = site.partition(name)
    if partition is None:
        fix = f"one of {', '.join(sorted(site.partitions))}"
        raise UserError("this cluster has no default partition", where=where, fix=fix)
    if partition.state != "UP":
        usable = sorted(other.name for other in site.partitions.values() if other.state == "UP")
        raise UserError(
            f"the partition {partition.name} is {partition.state}",
            where=where,
            fix=f"one of {', '.join(usable)}" if usable else "wait until it is up",
        )
    return partition


def _association(job: JobRequest, site: Site, partition: Partition | None) -> Association | None:
    """Returns the association that the job is charged to; None if it is unknown or associations are not enforced.

    An association for the partition of the job precedes an association of the same account for all partitions.
    """
    if site.associations is None or "associations" not in site.enforced:
        return None
    where = _set_by(job, "account")
    if not site.associations:
        fix = "ask the site's support for an account"
        raise UserError("you have no account on this cluster, which refuses jobs without one", where=where, fix=fix)
    account = _requested(job, "account")
    if account is None:
        charged = [association for association in site.associations if association.default]
    else:
        charged = [association for association in site.associations if association.account == account.lower()]
        if not charged:
            fix = f"one of {', '.join(sorted({association.account for association in site.associations}))}"
            raise UserError(f"account {account!r} is not one of yours on this cluster", where=where, fix=fix)
    by_partition = {association.partition: association for association in charged}
    if partition is not None and partition.name in by_partition:
        return by_partition[partition.name]
    return by_partition.get(None)


def _requested(job: JobRequest, key: str) -> str | None:
    """Returns the value of an option of the job: of a key of ``cluster``, or else of a variable of the shell."""
    value: str | None = getattr(job.config.cluster, key)
    return value or preset(key)


def _qos(job: JobRequest, association: Association | None) -> str | None:
    """Returns the QOS that the job gets; None if it is unknown."""
    requested = _requested(job, "qos")
    if requested is not None or association is None:
        return requested
    if association.default_qos is not None:
        return association.default_qos
    if len(association.qos) == 1:
        return next(iter(association.qos))
    return FALLBACK_QOS if FALLBACK_QOS in association.qos else None


def _flags(qos: str | None, site: Site) -> frozenset[str]:
    """Returns the flags of a QOS, some of which lift limits of the partition."""
    if qos is None or site.qos is None or qos not in site.qos:
        return frozenset()
    return site.qos[qos].flags


def _check_qos(job: JobRequest, site: Site, association: Association | None) -> None:
    qos = _requested(job, "qos")
    if qos is None or site.qos is None or "qos" not in site.enforced:
        return
    allowed = (association.qos if association is not None else None) or frozenset(site.qos)
    if qos not in allowed:
        what = f"QOS {qos!r} does not exist here"
        if qos in site.qos:
            what = f"your account may not use QOS {qos!r}"
        fix = f"one of {', '.join(sorted(allowed))}, or null for the default"
        raise UserError(what, where=_set_by(job, "qos"), fix=fix)


def _check_access(job: JobRequest, partition: Partition, association: Association | None) -> None:
    account = association.account if association is not None else _requested(job, "account")
    qos = _requested(job, "qos")
    for key, name, allowed in (("account", account, partition.accounts), ("qos", qos, partition.qos)):
        if name is not None and allowed is not None and name not in allowed:
            raise UserError(
                f"partition {partition.name} does not allow {key} {name}",
                where=_set_by(job, key),
                fix=f"one of {', '.join(sorted(allowed))}, or another cluster.partition",
            )


def _check_gpus(job: JobRequest, partition: Partition) -> None:
    cluster = job.config.cluster
    gpu_type = cluster.gpu_type
    if not job.gpus or cluster.gres is not None:
        return
    most = max(kind.gpus_of(gpu_type) for kind in partition.kinds)
    if job.gpus > most:
        types = sorted({name for kind in partition.kinds for name in kind.gpus if name})
        of_type = f" of type {gpu_type}" if gpu_type else ""
        fix = f"cluster.gpus_per_node={most} or fewer" if most else "another cluster.partition"
        raise UserError(
            f"{job.gpus} GPUs{of_type} per node are requested, but nodes of partition {partition.name} have {most}",
            where="cluster.gpus_per_node" + (", cluster.gpu_type" if gpu_type else ""),
            fix=fix + (f"; types here: {', '.join(types)}" if types else ""),
        )
    nodes = sum(kind.count for kind in _with_gpus(job, partition))
    fewest = asked_nodes(job.config)[0]
    if fewest > nodes:
        raise UserError(
            f"{fewest} nodes with {job.gpus} GPUs are requested, but partition {partition.name} has {nodes}",
            where="cluster.nodes, cluster.gpus_per_node",
            fix=f"cluster.nodes={nodes} or fewer, another cluster.partition, or cluster.gpus_per_node=0 for CPUs",
        )
    # several MIG slices of a node may belong to one GPU; the full GPUs of the partition may suffice
    slices = max(kind.slices_of(gpu_type) for kind in partition.kinds)
    full = max(kind.gpus_of(gpu_type) - kind.slices_of(gpu_type) for kind in partition.kinds)
    if job.gpus > 1 and slices and full < job.gpus:
        types = sorted({name for kind in partition.kinds for name in kind.gpus if name and not MIG.search(name)})
        raise UserError(
            f"{job.gpus} GPUs per node are requested, but partition {partition.name} has so many only as MIG slices, "
            "and NCCL cannot connect two slices of one GPU",
            where="cluster.gpus_per_node",
            fix="cluster.gpus_per_node=1" + (f", or the whole GPUs of cluster.gpu_type={types[0]}" if types else ""),
        )


def _check_cores_and_memory(job: JobRequest, partition: Partition) -> None:
    """Compares the request with what jobs can get; for memory, ``RealMemory - MemSpecLimit`` of slurm.conf in MiB."""
    cluster = job.config.cluster
    nodes = f"nodes of partition {partition.name}"
    most = max(kind.cores for kind in partition.kinds)
    count = cores(job, partition)
    if most and count is not None and count > most:
        key = "cluster.cpus_per_gpu" if isinstance(cluster.cpus_per_gpu, int) else "cluster.cpu_workers"
        what = f"{count} cores per node are requested, but {nodes} have {most}"
        raise UserError(what, where=key, fix=f"reduce {key}")
    amount = memory(job, partition)
    size = SIZE_MB.fullmatch(amount or "")
    most = max(kind.memory_mb for kind in partition.kinds)
    if size is None or not most or int(size[1]) * UNIT_MB[size[2].upper()] <= most:
        return
    key, largest = "cluster.mem", most
    if cluster.mem is None:
        key, largest = "cluster.mem_per_gpu", most // max(1, job.gpus, job.workers)
    raise UserError(
        f"{amount} of memory per node are requested, but {nodes} have at most {most}M",
        where=key,
        fix=f"{key}={largest}M or less, or another cluster.partition",
    )


def _check_time(job: JobRequest, limits: Sequence[NamedLimits], partition: Partition | None) -> None:
    """Checks the time limit of the job, also against the limit of ``partition`` unless that is None."""
    time = job.config.cluster.time_min or job.config.cluster.time
    requested_s = seconds(time)
    spans = _first(limits, "max_time_s")
    if partition is not None and partition.max_time_s is not None:
        spans.append((f"partition {partition.name}", partition.max_time_s))
    for source, limit_s in spans:
        if requested_s is not None and requested_s > limit_s:
            raise UserError(
                f"a time limit of {time} is requested, but {source} allows {clock(limit_s)}",
                where="cluster.time",
                fix=f"cluster.time={clock(limit_s)} or less (the run continues in its next job), or another QOS",
            )


SCOPES = {"max": "per job", "user": "for all jobs of a user", "group": "for all of its jobs together"}


def _check_size(job: JobRequest, limits: Sequence[NamedLimits]) -> None:
    """Raises UserError if the job alone exceeds a limit. Limits of several jobs may also make it wait for others."""
    nodes, most_nodes = asked_nodes(job.config)
    where = "cluster.nodes, cluster.gpus_per_node"
    for unit, count, most_count in (("nodes", nodes, most_nodes), ("GPUs", nodes * job.gpus, most_nodes * job.gpus)):
        for scope, words in SCOPES.items():
            for source, most in _first(limits, f"{scope}_{unit.lower()}"):
                if count > most:
                    raise UserError(
                        f"{count} {unit} are requested, but {source} allows {most} {words}",
                        where=where,
                        fix="request fewer, or use another account or QOS",
                    )
        for source, least in _first(limits, f"min_{unit.lower()}"):
            if most_count < least:
                requested = counted(most_count, unit.removesuffix("s"), unit)
                raise UserError(
                    f"the job requests {requested}, but {source} requires {least} per job",
                    where=where,
                    fix="request more, or use another QOS",
                )


def _limits(
    job: JobRequest, site: Site, partition: Partition | None, association: Association | None
) -> list[NamedLimits]:
    """Returns the limits that apply to the job, in the order in which Slurm looks for the first that is set."""
    if "limits" not in site.enforced:
        return []
    qos = _qos(job, association)
    sources = [(f"QOS {qos}", qos)]
    if partition is not None:
        of_partition = (f"QOS {partition.own_qos} of partition {partition.name}", partition.own_qos)
        sources.insert(1 if "OverPartQOS" in _flags(qos, site) else 0, of_partition)
    limits_of = site.qos or {}
    limits = [(source, limits_of[name]) for source, name in sources if name is not None and name in limits_of]
    if association is not None:
        limits.append((f"account {association.account}", association.limits))
        limits += [(f"account {name}", group) for name, group in association.groups]
    return limits


def _first(limits: Sequence[NamedLimits], field: str) -> list[tuple[str, int]]:
    """Returns the first limit that is set, with the name of what sets it; empty if none is.

    The limits of an account and of the accounts above it all hold: if none of a QOS precedes them, the lowest counts.
    """
    values = [(source, getattr(of_source, field)) for source, of_source in limits]
    found = [(source, limit) for source, limit in values if limit is not None]
    if found and found[0][0].startswith("account "):
        found.sort(key=lambda limit: limit[1])
    return found[:1]
