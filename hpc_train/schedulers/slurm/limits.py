"""The cores and the memory that a job requests, and the limits of the site that it must meet.

Jobs are checked before submission, since many sites accept jobs that never start. A limit that is unknown refuses
nothing. Each error names the limit and the fix. Where several are set, the first in the order of
https://slurm.schedmd.com/resource_limits.html counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
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


class JobRequest(Protocol):
    """A job whose resources are requested.

    Attributes:
        gpus: per node.
        workers: per node.
    """

    @property
    def config(self) -> Config: ...

    @property
    def gpus(self) -> int: ...

    @property
    def workers(self) -> int: ...


def cores(job: JobRequest, partition: Partition | None) -> int | None:
    """Cores per node; None on exclusive nodes, where the job gets all cores.

    Without the option a task on a shared node gets one core.
    """
    per_rank = job.config.cluster.cpus_per_gpu
    if isinstance(per_rank, int):
        return per_rank * job.workers
    if job.config.cluster.exclusive:
        return None
    if not job.gpus or partition is None:
        return job.workers
    if partition.cores_per_gpu is not None:
        return partition.cores_per_gpu * job.gpus
    shares = [kind.cores * job.gpus // kind.gpus_of(None) for kind in _fitting(job, partition)]
    return max(min(shares, default=job.workers), job.workers)


def memory(job: JobRequest, partition: Partition | None) -> str | None:
    """Returns memory per node; None for the default of the partition."""
    cluster = job.config.cluster
    if cluster.mem is not None:
        return cluster.mem
    if cluster.mem_per_gpu != "auto":
        return _times(cluster.mem_per_gpu, job.workers)
    if cluster.exclusive:
        return "0"  # all memory of the node
    if not job.gpus or partition is None or partition.memory_default:
        return None
    shares = [kind.memory_mb * job.gpus // kind.gpus_of(None) for kind in _fitting(job, partition)]
    return f"{min(shares)}M" if shares else None


def _fitting(job: JobRequest, partition: Partition) -> list[NodeKind]:
    kind_of_gpu = job.config.cluster.gpu_type
    return [kind for kind in partition.kinds if kind.gpus_of(kind_of_gpu) >= job.gpus]


def _times(amount: str, count: int) -> str:
    digits = amount.rstrip("KMGTkmgt")
    if not digits.isdigit() or len(amount) - len(digits) > 1:
        raise UserError(
            f"cluster.mem_per_gpu is {amount!r}, not a size",
            where="cluster.mem_per_gpu",
            fix="64G (K, M, G or T), or auto",
        )
    return f"{int(digits) * count}{amount[len(digits) :]}"


SIZE_MB = re.compile(r"(\d+)([KMGT]?)B?", re.IGNORECASE)  # sbatch --mem
UNIT_MB = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}
FALLBACK_QOS = "normal"  # of jobs without a QOS whose association has several and no default

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
        _check_nodes(job, partition, flags)
        _check_hardware(job, partition)
    limits = _limits(job, site, partition, association)
    _check_time(job, limits, None if "PartitionTimeLimit" in flags else partition)
    _check_size(job, limits)


def check_queue(jobs: Sequence[JobRequest], site: Site) -> None:
    """Raises UserError if more jobs are submitted than the user may have in the queue."""
    job = jobs[0]
    if other_clusters(job.config.cluster.clusters, site) is not None:
        return
    count = sum(each.config.launch.chain for each in jobs)
    partition = _partition(job, site)
    limits = _limits(job, site, partition, _association(job, site, partition))
    for whose, most in _first(limits, lambda found: found.max_jobs):
        if count > most:
            raise UserError(
                f"{count} jobs are submitted, but {whose} allows {most} in the queue",
                where="the command line",
                fix=f"submit sweeps of at most {most} jobs, one after the other",
            )


def _set_by(job: JobRequest, key: str) -> str:
    """Returns what sets an option of the job: a key of ``cluster``, or a variable of the shell."""
    by_shell = getattr(job.config.cluster, key) is None and preset(key) is not None
    return f"SBATCH_{key.upper()} of this shell" if by_shell else f"cluster.{key}"


def _partition(job: JobRequest, site: Site) -> Partition | None:
    asked = job.config.cluster.partition or preset("partition")
    if not site.partitions:
        return None
    names = (asked or "").split(",")
    unknown = [name for name in names if name and name not in site.partitions]
    if unknown:
        raise UserError(
            f"partition {unknown[0]!r} does not exist on {site.name or 'this cluster'}",
            where=_set_by(job, "partition"),
            fix=nearest(unknown[0], sorted(site.partitions)),
        )
    if len(names) > 1:
        return None  # Slurm uses the one in which the job starts first
    partition = site.partition(asked)
    if partition is None:
        raise UserError(
            "this cluster has no default partition",
            where=_set_by(job, "partition"),
            fix=f"one of {', '.join(sorted(site.partitions))}",
        )
    if partition.state != "UP":
        open_ones = sorted(found.name for found in site.partitions.values() if found.state == "UP")
        raise UserError(
            f"the partition {partition.name} is {partition.state}",
            where=_set_by(job, "partition"),
            fix=f"one of {', '.join(open_ones)}" if open_ones else "wait until it is up",
        )
    return partition


def _association(job: JobRequest, site: Site, partition: Partition | None) -> Association | None:
    """Returns the association that the job is charged to; None if it is unknown or associations are not enforced.

    An association with the partition of the job precedes that of the same account with all partitions.
    """
    if site.associations is None or "associations" not in site.enforced:
        return None
    account, known = _account(job), sorted({found.account for found in site.associations})
    if not known:
        raise UserError(
            "you have no account on this cluster, which refuses jobs without one",
            where=_set_by(job, "account"),
            fix="ask the site's support for an account",
        )
    own = [each for each in site.associations if (each.account == account.lower() if account else each.default)]
    if account is not None and not own:
        raise UserError(
            f"account {account!r} is not one of yours on this cluster",
            where=_set_by(job, "account"),
            fix=f"one of {', '.join(known)}",
        )
    by_partition = {found.partition: found for found in own}
    return by_partition.get(partition.name if partition else None) or by_partition.get(None)


def _account(job: JobRequest) -> str | None:
    return job.config.cluster.account or preset("account")


def _asked_qos(job: JobRequest) -> str | None:
    return job.config.cluster.qos or preset("qos")


def _qos(job: JobRequest, association: Association | None) -> str | None:
    """Returns the QOS that the job gets; None if it is unknown."""
    asked = _asked_qos(job)
    if asked is not None or association is None:
        return asked
    if association.default_qos is not None:
        return association.default_qos
    return next(iter(association.qos if len(association.qos) == 1 else association.qos & {FALLBACK_QOS}), None)


def _flags(qos: str | None, site: Site) -> frozenset[str]:
    """Returns the flags of a QOS, some of which lift limits of the partition."""
    return site.qos[qos].flags if qos is not None and site.qos is not None and qos in site.qos else frozenset()


def _check_qos(job: JobRequest, site: Site, association: Association | None) -> None:
    qos = _asked_qos(job)
    if qos is None or site.qos is None or "qos" not in site.enforced:
        return
    allowed = association.qos if association is not None and association.qos else frozenset(site.qos)
    if qos not in allowed:
        raise UserError(
            f"your account may not use QOS {qos!r}" if qos in site.qos else f"QOS {qos!r} does not exist here",
            where=_set_by(job, "qos"),
            fix=f"one of {', '.join(sorted(allowed))}, or null for the default",
        )


def _check_access(job: JobRequest, partition: Partition, association: Association | None) -> None:
    account = association.account if association is not None else _account(job)
    for key, name, allowed in (
        ("account", account, partition.accounts),
        ("qos", _asked_qos(job), partition.qos),
    ):
        if name is not None and allowed is not None and name not in allowed:
            raise UserError(
                f"partition {partition.name} does not allow {key} {name}",
                where=_set_by(job, key),
                fix=f"one of {', '.join(sorted(allowed))}, or another cluster.partition",
            )


def _check_nodes(job: JobRequest, partition: Partition, flags: frozenset[str]) -> None:
    fewest = asked_nodes(job.config)[0]
    allowed = None if "PartitionMaxNodes" in flags else partition.max_nodes
    most = min(limit for limit in (allowed, partition.nodes or None, 10**9) if limit is not None)
    if fewest > most:
        owns = "has" if most == partition.nodes else "allows"
        raise UserError(
            f"{fewest} nodes are requested, but partition {partition.name} {owns} {most}",
            where="cluster.nodes",
            fix=f"cluster.nodes={most} or fewer, or another cluster.partition",
        )


def _check_hardware(job: JobRequest, partition: Partition) -> None:
    cluster = job.config.cluster
    if not partition.kinds:
        return
    name = f"nodes of partition {partition.name}"
    if job.gpus and cluster.gres is None:
        best = max(kind.gpus_of(cluster.gpu_type) for kind in partition.kinds)
        if job.gpus > best:
            types = sorted({found for kind in partition.kinds for found in kind.gpus if found})
            of_type = f" of type {cluster.gpu_type}" if cluster.gpu_type else ""
            fix = f"cluster.gpus_per_node={best} or fewer" if best else "another cluster.partition"
            raise UserError(
                f"{job.gpus} GPUs{of_type} per node are requested, but {name} have {best}",
                where="cluster.gpus_per_node" + (", cluster.gpu_type" if of_type else ""),
                fix=fix + (f"; types here: {', '.join(types)}" if types else ""),
            )
        _check_nodes_with_gpus(job, partition)
        _check_slices(job, partition)
    most = max(kind.cores for kind in partition.kinds)
    asked = cores(job, partition)
    if most and asked is not None and asked > most:
        key = "cluster.cpus_per_gpu" if isinstance(cluster.cpus_per_gpu, int) else "cluster.cpu_workers"
        raise UserError(f"{asked} cores per node are requested, but {name} have {most}", where=key, fix=f"reduce {key}")
    _check_memory(job, partition)


def _check_memory(job: JobRequest, partition: Partition) -> None:
    """The memory of a node is what Slurm may give to jobs, in MiB (``RealMemory - MemSpecLimit`` of slurm.conf)."""
    asked = memory(job, partition)
    size = SIZE_MB.fullmatch(asked or "")
    most = max(kind.memory_mb for kind in partition.kinds)
    if size is None or not most or int(size[1]) * UNIT_MB[size[2].upper()] <= most:
        return
    total = job.config.cluster.mem is not None
    key, largest = ("mem", most) if total else ("mem_per_gpu", most // max(1, job.workers))
    raise UserError(
        f"{asked} of memory per node are requested, but nodes of partition {partition.name} have at most {most}M",
        where=f"cluster.{key}",
        fix=f"cluster.{key}={largest}M or less, or another cluster.partition",
    )


def _check_slices(job: JobRequest, partition: Partition) -> None:
    """Rejects several MIG slices per node, which may be of one GPU. Whole GPUs of the partition may be enough."""
    gpu_type = job.config.cluster.gpu_type
    slices = max(kind.slices_of(gpu_type) for kind in partition.kinds)
    whole = max(kind.gpus_of(gpu_type) - kind.slices_of(gpu_type) for kind in partition.kinds)
    if job.gpus > 1 and slices and whole < job.gpus:
        types = sorted({name for kind in partition.kinds for name in kind.gpus if name and not MIG.search(name)})
        raise UserError(
            f"{job.gpus} GPUs per node are requested, but partition {partition.name} has only MIG slices as many, and "
            "NCCL cannot connect two slices of one GPU",
            where="cluster.gpus_per_node",
            fix="cluster.gpus_per_node=1" + (f", or the whole GPUs of cluster.gpu_type={types[0]}" if types else ""),
        )


def _check_nodes_with_gpus(job: JobRequest, partition: Partition) -> None:
    fewest = asked_nodes(job.config)[0]
    there = sum(kind.count for kind in partition.kinds if kind.gpus_of(job.config.cluster.gpu_type) >= job.gpus)
    if fewest > there:
        raise UserError(
            f"{fewest} nodes with {job.gpus} GPUs are requested, but partition {partition.name} has {there}",
            where="cluster.nodes, cluster.gpus_per_node",
            fix=f"cluster.nodes={there} or fewer, another cluster.partition, or cluster.gpus_per_node=0 for CPUs",
        )


def _check_time(job: JobRequest, limits: Sequence[NamedLimits], partition: Partition | None) -> None:
    """Checks the time limit of the job, with that of ``partition`` unless it is None."""
    cluster = job.config.cluster
    asked = seconds(cluster.time_min or cluster.time)
    spans = _first(limits, lambda found: found.max_time_s)
    if partition is not None and partition.max_time_s is not None:
        spans.append((f"partition {partition.name}", partition.max_time_s))
    for whose, limit in spans:
        if asked is not None and asked > limit:
            raise UserError(
                f"a time limit of {cluster.time_min or cluster.time} is requested, but {whose} allows {clock(limit)}",
                where="cluster.time",
                fix=f"cluster.time={clock(limit)} or less (the run continues in its next job), or another QOS",
            )


def _check_size(job: JobRequest, limits: Sequence[NamedLimits]) -> None:
    fewest = asked_nodes(job.config)[0]
    nodes = _first(limits, lambda found: found.max_nodes)
    gpus = _first(limits, lambda found: found.max_gpus)
    for what, count, found in (("nodes", fewest, nodes), ("GPUs", fewest * job.gpus, gpus)):
        for whose, most in found:
            if count > most:
                raise UserError(
                    f"{count} {what} are requested, but {whose} allows {most} per job",
                    where="cluster.nodes, cluster.gpus_per_node",
                    fix="request fewer, or use another account or QOS",
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
        place = 1 if "OverPartQOS" in _flags(qos, site) else 0
        sources.insert(place, (f"QOS {partition.own_qos} of partition {partition.name}", partition.own_qos))
    known = site.qos or {}
    found = [(whose, known[name]) for whose, name in sources if name is not None and name in known]
    if association is not None:
        found.append((f"account {association.account}", association.limits))
    return found


def _first(limits: Sequence[NamedLimits], value: Callable[[PartitionLimits], int | None]) -> list[tuple[str, int]]:
    """Returns the first limit that is set, with the name of what sets it; empty if none is."""
    values = [(whose, value(found)) for whose, found in limits]
    return [(whose, limit) for whose, limit in values if limit is not None][:1]
