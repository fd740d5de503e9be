"""Slurm as this machine sees it: tools, controller, accounting, partitions; and whether the job asked for can start."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from hpc_train.cluster.site import Partition, Site
from hpc_train.config.errors import ConfigError
from hpc_train.launch.doctor.finding import ERROR, OK, WARNING, Finding
from hpc_train.launch.job import Job
from hpc_train.launch.limits import check_limits
from hpc_train.launch.place import controller_answers
from hpc_train.launch.storage import check_room

TOOLS = ("sbatch", "srun", "scontrol", "squeue", "scancel")
SHOWN = 12


def check_tools(wanted: bool) -> Finding:
    """Whether jobs can be submitted from here. ``wanted``: the config says that they must."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if len(missing) == len(TOOLS):
        text = "there is none here: runs stay on this machine"
        return Finding("Slurm", ERROR if wanted else OK, text, "a login node, or cluster=local" if wanted else "")
    if missing:
        return Finding("Slurm", ERROR, f"{', '.join(missing)} missing", "the site's Slurm module on PATH")
    if not controller_answers():
        text = "the controller does not answer (scontrol ping)" + ("" if wanted else ": runs stay on this machine")
        return Finding("Slurm", ERROR if wanted else WARNING, text, "wait, or ask the site")
    return Finding("Slurm", OK, "tools are here and the controller answers")


def check_accounting(site: Site) -> Finding:
    if site.associations is not None:
        accounts = ", ".join(sorted({found.account for found in site.associations})) or "none of yours"
        return Finding("accounting", OK, f"answers; accounts: {accounts}")
    mend = "none needed; where the site has accounting: sacctmgr on PATH"
    return Finding("accounting", WARNING, "does not answer: limits of accounts are not checked before submission", mend)


def check_partitions(site: Site) -> Iterator[Finding]:
    for found in list(site.partitions.values())[:SHOWN]:
        text = _described(found)
        if found.state == "UP":
            yield Finding("partition", OK, text)
        else:
            yield Finding("partition", WARNING, f"{text}: {found.state}", "another one, or wait until it is up")
    if len(site.partitions) > SHOWN:
        yield Finding("partition", OK, f"and {len(site.partitions) - SHOWN} more: sinfo -s")


def check_job(job: Job, site: Site | None) -> Iterator[Finding]:
    """Whether a run with this config can start, and its checkpoints fit."""
    try:
        if site is not None:
            check_limits(job, site)
        notes = check_room([job])
    except ConfigError as error:
        yield Finding("job", ERROR, f"{error.what} ({error.where})", error.mend)
        return
    device = f"{job.gpus} GPUs per node" if job.gpus else "on CPUs"
    yield Finding("job", OK, f"{job.layout}, {device}: {'; '.join(notes) or 'can start'}")


def _described(partition: Partition) -> str:
    default = ", the default" if partition.default else ""
    hours = "no time limit" if partition.max_time_s is None else f"up to {partition.max_time_s / 3600:g} h"
    gpus = sorted({f"{count} {kind or 'GPUs'}" for nodes in partition.kinds for kind, count in nodes.gpus.items()})
    return f"{partition.name}{default}: {partition.nodes} nodes, {hours}" + (f", {', '.join(gpus)}" if gpus else "")
