"""Computes the maximum cost of a submission, which is printed first, and asks for confirmation if it is large."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from rich.console import Console

from hpc_train.config.values import asked_nodes
from hpc_train.errors import UserError
from hpc_train.launch.gpus import asked_gpus
from hpc_train.launch.job import Job
from hpc_train.runs.cost import Prices
from hpc_train.schedulers.slurm.limits import cores, memory
from hpc_train.schedulers.slurm.records import seconds
from hpc_train.schedulers.slurm.site import Site
from hpc_train.schedulers.slurm.variables import preset
from hpc_train.units import counted


def gpu_hours(jobs: Sequence[Job]) -> float:
    """Returns an upper bound of the GPU-hours.

    It assumes that every job uses its largest number of nodes until its time limit in each start, after each requeue or
    in each job of its chain. A run uses at most ``run.max_gpu_hours``, where it is stopped.
    """
    bounds = []
    for job in jobs:
        job_hours = (seconds(job.config.cluster.time) or 0) / 3600 * _starts(job)
        hours = asked_nodes(job.config)[1] * job.gpus * job_hours
        most = job.config.run.max_gpu_hours
        bounds.append(hours if most is None else min(hours, most))
    return sum(bounds)


def cost_lines(jobs: Sequence[Job], site: Site, unit: str = "jobs") -> list[str]:
    """Returns one line for each kind of job, and a line with the total if there are several jobs.

    Args:
        unit: what ``jobs`` are: jobs, or components of heterogeneous jobs.
    """
    kinds = Counter(_line(job, site) for job in jobs)
    total = total_cost(jobs)
    if len(jobs) == 1:
        lines = [f"{text}: {total}" for text in kinds]
    else:
        lines = [*(f"{count} x {text}" for text, count in kinds.items()), f"{len(jobs)} {unit}, {total}"]
    lines += sorted({note for job in jobs for note in _notes(job, site)})
    return lines + confirmation_notes(jobs)


def confirmation_notes(jobs: Sequence[Job]) -> list[str]:
    """Returns a note if ``confirm_cost`` asks."""
    if not _is_much(jobs):
        return []
    return [f"note: {_above(jobs)}: a terminal asks for confirmation; without one, set launch.yes=true"]


def total_cost(jobs: Sequence[Job]) -> str:
    """Returns the maximum cost of all jobs: "at most 8 GPU-hours (with up to 3 requeues), 20.00 EUR"."""
    config = jobs[0].config
    starts = max(map(_starts, jobs))
    how = f"with up to {counted(starts - 1, 'requeue', 'requeues')}"
    if config.launch.chain > 1:
        how = f"a chain of {starts} jobs"
    total = f"at most {gpu_hours(jobs):g} GPU-hours ({how})"
    prices = Prices.of_config(config.cluster.price)
    if prices.gpu_hour is not None:
        total += f", {prices.money(gpu_hours(jobs) * prices.gpu_hour)}"
    return total


def confirm_cost(jobs: Sequence[Job], console: Console) -> None:
    """Asks for confirmation at a terminal if the submission may cost more than ``launch.confirm_gpu_hours``.

    Raises UserError if the answer is no, or there is no terminal and ``launch.yes`` is not set.
    """
    if not _is_much(jobs):
        return
    what = f"this may cost up to {gpu_hours(jobs):g} GPU-hours"
    if not can_ask(console):
        raise UserError(f"{what}, {_above(jobs)}", where="launch.confirm_gpu_hours", fix="launch.yes=true confirms it")
    if console.input(f"{what}. Submit? [y/N] ").strip().lower() not in ("y", "yes"):
        raise UserError(f"{what}: not submitted", where="the terminal", fix="y to submit, or launch.yes=true")


def _starts(job: Job) -> int:
    if job.config.launch.chain > 1:
        return job.config.launch.chain
    return 1 + job.config.elastic.max_requeues


def _is_much(jobs: Sequence[Job]) -> bool:
    launch = jobs[0].config.launch
    return not launch.yes and gpu_hours(jobs) > launch.confirm_gpu_hours


def _above(jobs: Sequence[Job]) -> str:
    return f"above launch.confirm_gpu_hours={jobs[0].config.launch.confirm_gpu_hours:g}"


def _line(job: Job, site: Site) -> str:
    cluster = job.config.cluster
    name = cluster.partition or preset("partition")
    partition = site.partition(name)
    account = cluster.account or preset("account")
    if account is None:
        defaults = (association.account for association in site.associations or () if association.default)
        account = next(defaults, "the site's default")
    if name is None:
        name = partition.name if partition else "the site's default"
    nodes = counted(cluster.nodes, "node", "nodes")
    if job.config.elastic.spares:
        nodes = f"{cluster.nodes} and {job.config.elastic.spares} spare nodes"
    amount = memory(job, partition) or "default"
    per_node = [f"{cores(job, partition) or 'all'} cores", f"{'all' if amount == '0' else amount} memory"]
    if job.gpus:
        per_node.insert(0, f"{job.gpus} GPUs")
    return f"account {account}, partition {name}, {nodes} with {', '.join(per_node)}, {cluster.time}"


def _notes(job: Job, site: Site) -> list[str]:
    partition = site.partition(job.config.cluster.partition or preset("partition"))
    note = asked_gpus(job.config.cluster, site).note
    if note is not None:
        return [note]
    count = cores(job, partition)
    if job.gpus and count is not None and count < 2 * job.workers:
        return [
            "note: fewer than two cores per rank; cluster.cpus_per_gpu=2 or more lets loading overlap with training"
        ]
    most = max((kind.gpus_of(None) for kind in partition.kinds), default=0) if partition else 0
    if most and not job.gpus and job.config.cluster.gpus_per_node == 0 and not job.config.run.roles:
        return [f"note: no GPU is requested; cluster.gpus_per_node=auto requests the {most} of a node"]
    return []


def can_ask(console: Console) -> bool:
    """Returns whether ``console`` is a terminal at which a user can answer."""
    return console.is_terminal and sys.stdin.isatty()
