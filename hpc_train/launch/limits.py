"""Checks jobs against the limits of the site before submission, since many sites accept jobs that never start.

A limit that is unknown refuses nothing. Each error names the limit and the fix.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from hpc_train.config.values import asked_nodes
from hpc_train.errors import UserError, nearest
from hpc_train.launch.executors.executor import Job
from hpc_train.launch.sbatch import cores, memory
from hpc_train.slurm.site import Association, Partition, PartitionLimits, Site, seconds

SIZE_MB = re.compile(r"(\d+)([KMGT]?)B?", re.IGNORECASE)  # sbatch --mem
UNIT_MB = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}


def check_limits(job: Job, site: Site) -> None:
    """Raises UserError if the job can never start on ``site``."""
    if job.config.cluster.clusters is not None:
        return  # the limits of another cluster are unknown here; sbatch checks them
    partition = _partition(job, site)
    association = _association(job, site)
    _check_qos(job, site, association)
    if partition is not None:
        _check_access(job, partition, association)
        _check_nodes(job, partition)
        _check_hardware(job, partition)
    _check_time(job, site, partition, association)


def check_queue(jobs: Sequence[Job], site: Site) -> None:
    """Raises UserError if more jobs are submitted than the user may have in the queue."""
    count = sum(job.config.launch.chain for job in jobs)
    for whose, limits in _limits(jobs[0], site, _association(jobs[0], site)):
        if limits.max_jobs is not None and count > limits.max_jobs:
            raise UserError(
                f"{count} jobs are submitted, but {whose} allows {limits.max_jobs} in the queue",
                where="the command line",
                fix=f"submit sweeps of at most {limits.max_jobs} jobs, one after the other",
            )


def _partition(job: Job, site: Site) -> Partition | None:
    cluster = job.config.cluster
    if not site.partitions:
        return None
    names = (cluster.partition or "").split(",")
    unknown = [name for name in names if name and name not in site.partitions]
    if unknown:
        raise UserError(
            f"partition {unknown[0]!r} does not exist on {site.name or 'this cluster'}",
            where="cluster.partition",
            fix=nearest(unknown[0], sorted(site.partitions)),
        )
    if len(names) > 1:
        return None  # Slurm uses the one in which the job starts first
    partition = site.partition(cluster.partition)
    if partition is None:
        raise UserError(
            "this cluster has no default partition",
            where="cluster.partition",
            fix=f"one of {', '.join(sorted(site.partitions))}",
        )
    if partition.state != "UP":
        open_ones = sorted(found.name for found in site.partitions.values() if found.state == "UP")
        raise UserError(
            f"the partition {partition.name} is {partition.state}",
            where="cluster.partition",
            fix=f"one of {', '.join(open_ones)}" if open_ones else "wait until it is up",
        )
    return partition


def _association(job: Job, site: Site) -> Association | None:
    """Returns the association that the job is charged to; None if it is unknown or associations are not enforced."""
    if site.associations is None or "associations" not in site.enforced:
        return None
    account, known = job.config.cluster.account, sorted({found.account for found in site.associations})
    if not known:
        raise UserError(
            "you have no account on this cluster, which refuses jobs without one",
            where="cluster.account",
            fix="ask the site's support for an account",
        )
    if account is None:
        return next((found for found in site.associations if found.default), None)
    found = next((found for found in site.associations if found.account == account.lower()), None)
    if found is None:
        raise UserError(
            f"account {account!r} is not one of yours on this cluster",
            where="cluster.account",
            fix=f"one of {', '.join(known)}",
        )
    return found


def _check_qos(job: Job, site: Site, association: Association | None) -> None:
    qos = job.config.cluster.qos
    if qos is None or site.qos is None or "qos" not in site.enforced:
        return
    allowed = association.qos if association is not None and association.qos else frozenset(site.qos)
    if qos not in allowed:
        raise UserError(
            f"your account may not use QOS {qos!r}" if qos in site.qos else f"QOS {qos!r} does not exist here",
            where="cluster.qos",
            fix=f"one of {', '.join(sorted(allowed))}, or null for the default",
        )


def _check_access(job: Job, partition: Partition, association: Association | None) -> None:
    account = association.account if association is not None else job.config.cluster.account
    for key, name, allowed in (
        ("account", account, partition.accounts),
        ("qos", job.config.cluster.qos, partition.qos),
    ):
        if name is not None and allowed is not None and name not in allowed:
            raise UserError(
                f"partition {partition.name} does not allow {key} {name}",
                where=f"cluster.{key}",
                fix=f"one of {', '.join(sorted(allowed))}, or another cluster.partition",
            )


def _check_nodes(job: Job, partition: Partition) -> None:
    fewest = asked_nodes(job.config)[0]
    most = min(limit for limit in (partition.max_nodes, partition.nodes or None, 10**9) if limit is not None)
    if fewest > most:
        owns = "has" if most == partition.nodes else "allows"
        raise UserError(
            f"{fewest} nodes are requested, but partition {partition.name} {owns} {most}",
            where="cluster.nodes",
            fix=f"cluster.nodes={most} or fewer, or another cluster.partition",
        )


def _check_hardware(job: Job, partition: Partition) -> None:
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
    most = max(kind.cores for kind in partition.kinds)
    asked = cores(job, partition)
    if most and asked is not None and asked > most:
        key = "cluster.cpus_per_gpu" if isinstance(cluster.cpus_per_gpu, int) else "cluster.cpu_workers"
        raise UserError(f"{asked} cores per node are requested, but {name} have {most}", where=key, fix=f"reduce {key}")
    _check_memory(job, partition)


def _check_memory(job: Job, partition: Partition) -> None:
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


def _check_nodes_with_gpus(job: Job, partition: Partition) -> None:
    fewest = asked_nodes(job.config)[0]
    there = sum(kind.count for kind in partition.kinds if kind.gpus_of(job.config.cluster.gpu_type) >= job.gpus)
    if fewest > there:
        raise UserError(
            f"{fewest} nodes with {job.gpus} GPUs are requested, but partition {partition.name} has {there}",
            where="cluster.nodes, cluster.gpus_per_node",
            fix=f"cluster.nodes={there} or fewer, another cluster.partition, or cluster.gpus_per_node=0 for CPUs",
        )


def _check_time(job: Job, site: Site, partition: Partition | None, association: Association | None) -> None:
    cluster = job.config.cluster
    asked = seconds(cluster.time_min or cluster.time)
    spans = [(whose, limits.max_time_s) for whose, limits in _limits(job, site, association)]
    if partition is not None:
        spans.append((f"partition {partition.name}", partition.max_time_s))
    for whose, limit in spans:
        if asked is not None and limit is not None and asked > limit:
            raise UserError(
                f"a time limit of {cluster.time_min or cluster.time} is requested, but {whose} allows {clock(limit)}",
                where="cluster.time",
                fix=f"cluster.time={clock(limit)} or less (the run continues in its next job), or another QOS",
            )
    for whose, limits in _limits(job, site, association):
        fewest = asked_nodes(job.config)[0]
        wants = (("nodes", fewest, limits.max_nodes), ("GPUs", fewest * job.gpus, limits.max_gpus))
        for what, count, most in wants:
            if most is not None and count > most:
                raise UserError(
                    f"{count} {what} are requested, but {whose} allows {most} per job",
                    where="cluster.nodes, cluster.gpus_per_node",
                    fix="request fewer, or use another account or QOS",
                )


def _limits(job: Job, site: Site, association: Association | None) -> Iterator[tuple[str, PartitionLimits]]:
    """Returns the limits that apply to the job, each with the name of what sets it."""
    qos = job.config.cluster.qos
    if "limits" not in site.enforced:
        return
    if association is not None:
        yield f"account {association.account}", association.limits
        if qos is None and len(association.qos) == 1:
            qos = next(iter(association.qos))
    if qos is not None and site.qos is not None and qos in site.qos:
        yield f"QOS {qos}", site.qos[qos]


def clock(span_s: int) -> str:
    """Formats seconds as Slurm prints for time limits: 2-12:00:00."""
    days, rest = divmod(span_s, 86400)
    text = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{text}" if days else text
