"""The cores and the memory per node that a job requests."""

from __future__ import annotations

from typing import Protocol

from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.schedulers.slurm.site import NodeKind, Partition


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
