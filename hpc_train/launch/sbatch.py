"""What is asked of Slurm for a job, as sbatch's options.

They go on sbatch's command line: there they win over ``SBATCH_*`` variables that a shell or a site has set, which lines
in the script would not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_train.checkpoint.space import StopTime, stop_time
from hpc_train.config.schema import ClusterConfig, ElasticConfig
from hpc_train.config.values import asked_nodes, node_range
from hpc_train.errors import UserError
from hpc_train.launch.executors.executor import Job
from hpc_train.slurm.site import NodeKind, Partition, Site, gpus_of, seconds

Options = Mapping[str, str | None]  # by sbatch's long names without dashes; None: an option without a value

NO_SITE = Site("")


def options(job: Job, site: Site = NO_SITE) -> dict[str, str | None]:
    """The resources of ``job``: equal for jobs that may share an array.

    Raises:
        UserError: ``cluster.extra`` holds an option that has a key of its own.
    """
    cluster = job.config.cluster
    partition = site.partition(cluster.partition)
    fewest, most = asked_nodes(job.config)
    asked: dict[str, Any] = {
        "clusters": cluster.clusters,
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "reservation": cluster.reservation,
        "nodes": most if fewest == most else f"{fewest}-{most}",
        "ntasks-per-node": 1,
        **_devices(job),
        "cpus-per-task": cores(job, partition),
        "mem": memory(job, partition),
        "exclusive": cluster.exclusive,
        "constraint": cluster.constraint,
        "nodelist": cluster.nodelist,
        "exclude": cluster.exclude,
        "switches": cluster.switches,
        "licenses": cluster.licenses,
        "time": cluster.time,
        "time-min": cluster.time_min,
        "begin": cluster.begin,
        "dependency": cluster.dependency,
        "nice": cluster.nice,
        "wckey": cluster.wckey,
        "mail-user": cluster.mail_user,
        "mail-type": cluster.mail_type,
        "signal": f"USR2@{signal_lead(job).seconds:g}",
        "no-requeue" if job.config.launch.chain > 1 else "requeue": True,
        "no-kill": goes_on_without_a_node(job.config.elastic),
        "open-mode": "append",
    }
    _check_extra(cluster, asked)
    given = {**asked, **cluster.extra}
    return {name: _text(value) for name, value in given.items() if value is not None and value is not False}


def goes_on_without_a_node(elastic: ElasticConfig) -> bool:
    """Whether a job is to keep its other nodes when one is lost: Slurm and srun are to let it."""
    return elastic.spares > 0 or elastic.min_nodes is not None


def identity(jobs: Sequence[Job], directory: Path, output: Path) -> dict[str, str | None]:
    """How the submission of ``jobs`` is called and found again; ``output`` is where the batch script's output goes."""
    config = jobs[0].config
    comment = f"hpc_train:{directory} {config.cluster.comment or ''}".rstrip()
    name = config.cluster.job_name or f"hpc_train-{directory.name}"
    return {"job-name": name, "comment": comment, "output": str(output)}


def array(count: int, cap: int | str) -> dict[str, str | None]:
    """The option for ``count`` jobs in one array, ``cap`` of them at a time; nothing for a single job."""
    if count == 1:
        return {}
    return {"array": f"0-{count - 1}" + (f"%{cap}" if isinstance(cap, int) else "")}


def arguments(asked: Options) -> list[str]:
    """``asked`` as command-line arguments."""
    return [f"--{name}" if value is None else f"--{name}={value}" for name, value in asked.items()]


def cores(job: Job, partition: Partition | None) -> int | None:
    """Cores per node; None for all of a node that the job has for itself.

    Without the option a task of a shared node gets one, whatever the node has.
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


def memory(job: Job, partition: Partition | None) -> str | None:
    """Memory per node; None leaves it to the partition's default."""
    cluster = job.config.cluster
    if cluster.mem is not None:
        return cluster.mem
    if cluster.mem_per_gpu != "auto":
        return _times(cluster.mem_per_gpu, job.workers)
    if cluster.exclusive:
        return "0"  # all of the node's
    if not job.gpus or partition is None or partition.memory_default:
        return None
    shares = [kind.memory_mb * job.gpus // kind.gpus_of(None) for kind in _fitting(job, partition)]
    return f"{min(shares)}M" if shares else None


def stop_note(job: Job) -> str:
    """When Slurm asks the job to stop, and why then."""
    lead = signal_lead(job)
    return f"asked to stop {lead.seconds:g} s before the time limit, or up to a minute earlier: {lead.reason}"


def signal_lead(job: Job) -> StopTime:
    """How long before the time limit Slurm asks the job to stop: time to save, though never most of the job."""
    limit = seconds(job.config.cluster.time_min or job.config.cluster.time) or 0
    lead = stop_time(job.config, job.run, node_range(job.config.cluster)[0])
    if limit and lead.seconds > limit / 3:
        return StopTime(max(1, limit // 3), f"a third of the limit; {lead.seconds:g} s would be better: {lead.reason}")
    return StopTime(max(1, int(lead.seconds)), lead.reason)


def _fitting(job: Job, partition: Partition) -> list[NodeKind]:
    kind_of_gpu = job.config.cluster.gpu_type
    return [kind for kind in partition.kinds if kind.gpus_of(kind_of_gpu) >= job.gpus]


def _devices(job: Job) -> dict[str, Any]:
    cluster = job.config.cluster
    asked: dict[str, Any] = {"gres": cluster.gres}
    if job.gpus and not gpus_of(cluster.gres or ""):
        asked["gpus-per-node"] = f"{cluster.gpu_type}:{job.gpus}" if cluster.gpu_type else job.gpus
    return asked


def _check_extra(cluster: ClusterConfig, asked: Mapping[str, Any]) -> None:
    for name in cluster.extra:
        key = name.replace("-", "_")
        if name in asked or key in ("array", "job_name", "comment", "output", "gpus_per_node"):
            own = f"cluster.{key}" if hasattr(cluster, key) else "what hpc_train sets itself"
            raise UserError(
                f"sbatch's option {name} stands in cluster.extra",
                where="cluster.extra",
                fix=f"leave it out: it is {own}",
            )


def _text(value: Any) -> str | None:
    return None if value is True else str(value)


def _times(amount: str, count: int) -> str:
    digits = amount.rstrip("KMGTkmgt")
    if not digits.isdigit() or len(amount) - len(digits) > 1:
        raise UserError(
            f"mem_per_gpu is {amount!r}", where="cluster.mem_per_gpu", fix="a number with K, M, G or T: 64G; or auto"
        )
    return f"{int(digits) * count}{amount[len(digits) :]}"
