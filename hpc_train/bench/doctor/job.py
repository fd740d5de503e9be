"""Checks Slurm as seen from this machine (tools, controller, accounting, partitions), and whether the configured job
can start.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hpc_train.bench.doctor.node import check_sharing
from hpc_train.config.arguments import STRATEGY
from hpc_train.config.run_path import run_directory
from hpc_train.config.schema import Config, StrategyConfig
from hpc_train.config.values import node_range, with_all_workers
from hpc_train.errors import UserError
from hpc_train.launch.executors.executor import select_executor
from hpc_train.launch.gpus import asked_gpus
from hpc_train.launch.job import Job
from hpc_train.launch.request import ComposedJob, choose_and_check, compose_job, parse_line
from hpc_train.launch.sbatch import NO_SITE, arguments, options
from hpc_train.launch.storage import check_room
from hpc_train.layout.layout import JobShape
from hpc_train.layout.resolve import resolve_layout
from hpc_train.layout.validate import check_values
from hpc_train.machine.allocation import workers_per_node
from hpc_train.machine.health.finding import ERROR, OK, WARNING, Finding
from hpc_train.run.directory import RunDirectory
from hpc_train.schedulers.slurm.client import controller_answers
from hpc_train.schedulers.slurm.limits import check_limits
from hpc_train.schedulers.slurm.site import Site, read_site
from hpc_train.units import counted

NOT_FOR_A_CHECK = ("signal", "requeue", "no-requeue", "open-mode", "time", "time-min", "dependency", "begin", "no-kill")


def composed(overrides: Sequence[str]) -> ComposedJob:
    """Composes the config from ``overrides``. Raises UserError if a value is wrong on any machine."""
    job = compose_job(parse_line(overrides), "doctor")
    check_values(job.config)
    return job


def check_slurm_and_job(request: ComposedJob, submits: bool) -> Iterator[Finding]:
    """Checks Slurm and the job. With ``submits``, jobs are submitted from here; otherwise, this process runs inside an
    allocation.
    """
    cluster = request.config.cluster
    site = None
    if submits and cluster.kind in ("auto", "slurm"):
        yield check_tools(required=cluster.kind == "slurm")
        if controller_answers():
            site = read_site()
            yield check_accounting(site)
            yield from check_partitions(site)
            yield check_sharing(Path(request.config.run.root))
    try:
        job, described = _job(request)
        if site is not None:
            check_limits(job, site)
        notes = check_room([job])
    except UserError as error:
        yield Finding("job", ERROR, f"{error.what} ({error.where})", error.fix)
        return
    device = f"{job.gpus} GPUs per node" if job.gpus else "on CPUs"
    yield Finding("job", OK, f"{described}, {device}: {'; '.join(notes) or 'can start'}")


def resources(request: ComposedJob) -> list[str]:
    """Returns sbatch's options for a short job on the nodes that a run with this config would get.

    The nodes do not depend on the strategy, so the layout does not need to fit.
    """
    cluster = request.config.cluster
    site = read_site() if controller_answers() else NO_SITE
    gpus, workers = workers_per_node(cluster, visible=asked_gpus(cluster, site).count)
    nodes = node_range(cluster)[1]
    shape = JobShape.on_slurm(nodes, gpus, workers)
    config = with_all_workers(request.config, nodes * workers)
    layout = resolve_layout(config, nodes, workers)
    sbatch_options = options(Job(config, layout, shape, _directory(config)), site)
    return arguments({name: value for name, value in sbatch_options.items() if name not in NOT_FOR_A_CHECK})


def _job(request: ComposedJob) -> tuple[Job, str]:
    """Returns a run with this config, and its description. It is a data-parallel run if neither the command line nor an
    experiment selects a strategy for several nodes.
    """
    config = request.config
    shape = select_executor(config.cluster).shape(config)
    selects = any(STRATEGY.match(override) for override in request.line.overrides)
    described = ""
    if shape.nodes > 1 and not selects and config.strategy == StrategyConfig():
        config = with_all_workers(config, shape.nodes * shape.workers)
        shape = replace(shape, fewest_nodes=shape.nodes)
        described = f"{shape.nodes} nodes (without +strategy=NAME no layout is checked)"
    directory = _directory(config)
    config, layout, choice = choose_and_check(config, directory, shape)
    job = Job(config, layout, shape, directory, overrides=request.overrides, choice=choice)
    return job, described or str(layout)


def _directory(config: Config) -> RunDirectory:
    return RunDirectory(Path(run_directory(config.run.root, config.run.name, config.run.fork)))


TOOLS = ("sbatch", "srun", "scontrol", "squeue", "scancel")
SHOWN = 12


def check_tools(required: bool) -> Finding:
    """Checks whether jobs can be submitted from here. ``required`` states whether the config requires Slurm."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if len(missing) == len(TOOLS):
        text = "Slurm is not installed here; runs use this machine only"
        if required:
            return Finding("Slurm", ERROR, text, "use a login node or cluster=local")
        return Finding("Slurm", OK, text)
    if missing:
        return Finding("Slurm", ERROR, f"{', '.join(missing)} not found", "load the site's Slurm module")
    if not controller_answers():
        text = "the controller does not respond to `scontrol ping`"
        return Finding("Slurm", ERROR if required else WARNING, text, "wait, ask the site, or cluster=local")
    return Finding("Slurm", OK, "the tools are installed and the controller responds")


def check_accounting(site: Site) -> Finding:
    if site.associations is not None:
        accounts = ", ".join(sorted({association.account for association in site.associations})) or "none of yours"
        keeping = "keeps" if site.keeps_comments else "does not keep (AccountingStoreFlags=job_comment)"
        text = f"sacctmgr responds; accounts: {accounts}; sacct {keeping} the comments with the goodput of runs"
        return Finding("accounting", OK, text)
    fix = "put sacctmgr on PATH if the site has accounting; otherwise, ignore this"
    text = "sacctmgr does not respond; limits of accounts are not checked before submission"
    return Finding("accounting", WARNING, text, fix)


def check_partitions(site: Site) -> Iterator[Finding]:
    for partition in list(site.partitions.values())[:SHOWN]:
        name = partition.name
        if partition.default:
            name += ", the default"
        facts = [counted(partition.nodes, "node", "nodes"), "no time limit"]
        if partition.max_time_s is not None:
            facts[1] = f"up to {partition.max_time_s / 3600:g} h"
        facts += sorted(
            {f"{count} {kind or 'GPUs'}" for nodes in partition.kinds for kind, count in nodes.gpus.items()}
        )
        text = f"{name}: {', '.join(facts)}"
        if partition.state == "UP":
            yield Finding("partition", OK, text)
        else:
            fix = "use another partition, or wait until it is up"
            yield Finding("partition", WARNING, f"{text}: {partition.state}", fix)
    if len(site.partitions) > SHOWN:
        yield Finding("partition", OK, f"and {len(site.partitions) - SHOWN} more; list them with `sinfo -s`")
