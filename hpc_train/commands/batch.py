"""The commands for batch scripts that users write or adapt: ``freeze`` and ``script``.

A script calls ``freeze``, which writes a run directory and prints its path, and starts ``agent`` on every node with
that path. ``script`` prints a complete script that trains the same run and requests the same resources as ``-m``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import psutil

from hpc_train.checkpoint.space import stop_time
from hpc_train.config.arguments import refuse_search
from hpc_train.config.command_line import CommandLine
from hpc_train.config.extensions import is_import_path
from hpc_train.config.options import OptionParser
from hpc_train.config.run_path import job_directory
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.launch.continued import with_frozen_defaults
from hpc_train.launch.executors.allocation import shape_in_script
from hpc_train.launch.executors.executor import select_executor
from hpc_train.launch.executors.slurm import check_architecture, slurm_shape
from hpc_train.launch.gpus import EXPORT, asked_gpus
from hpc_train.launch.request import ComposedJob, check_job, compose_job, freeze_job, parse_line, print_notices
from hpc_train.launch.sbatch import (
    NO_SITE,
    check_script_signal,
    options_of_components,
    stop_note,
    survives_node_loss,
)
from hpc_train.launch.script import (
    BY_VARIABLES,
    Block,
    Script,
    blocks_of,
    by_hand,
    container_of,
    explanation,
    freezing,
    text_of,
)
from hpc_train.machine.allocation import refuse_components
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import write_text
from hpc_train.run.lease import add_submission, job_ids
from hpc_train.run.owner import TRUST
from hpc_train.schedulers.current import ENVIRONMENT, current_job
from hpc_train.schedulers.environment import EnvironmentJob
from hpc_train.schedulers.scheduler import CurrentJob
from hpc_train.schedulers.slurm.client import controller_answers
from hpc_train.schedulers.slurm.jobs import SlurmJob
from hpc_train.schedulers.slurm.site import read_site

SPOOLED = "slurm_script"  # slurmd's copy of a batch script


def freeze_run(arguments: list[str]) -> int:
    """Freezes the run that the overrides describe; with ``--task N``, freezes job N of a sweep.

    A requeued script finds the directory unchanged, even if the configs were edited since. The directory also holds
    ``job.sh``, which starts the agents and requeues the job if they request it, and ``gpus.sh``, which passes the GPUs
    of the job on to its steps, for scripts that start the agents themselves. Raises UserError if the config is wrong,
    lists several jobs, or the run may not be frozen."""
    parser = _parser("freeze", "Writes the directory of the run that the overrides describe, and prints its path.")
    parser.add_argument("--task", type=int, metavar="N", help="freeze job N of the sweep that the overrides describe")
    parser.add_argument(TRUST, action="store_true", help="use a run directory that belongs to another user")
    parser.add_argument("--json", action="store_true", help="print one JSON object with the path")
    options, rest = parser.parse_known_args(arguments)
    run = frozen_run(parse_line(rest), "freeze", options.task, options.trust_owner)
    print(json.dumps({"run": str(run.path)}) if options.json else run.path)
    return 0


def frozen_run(line: CommandLine, command: str, task: int | None = None, trust_owner: bool = False) -> RunDirectory:
    """Freezes the run that ``line`` describes, unless an earlier start of the job around this process has frozen it.
    Raises UserError as ``freeze_run``.

    Args:
        command: the name of the command, for messages.
        task: the number of the job in the sweep; None for a single job.
    """
    refuse_search(line, command)
    job = compose_job(line, command, sweep="add --task N to freeze job N of the sweep", task=task)
    refuse_components(job.config)
    in_job = current_job()
    is_slurm = isinstance(in_job, SlurmJob)
    if job.config.run.name is None and is_slurm:
        # the name survives a requeue, and the tasks of an array share one parent directory
        array = in_job.job_id if task is None else os.environ.get("SLURM_ARRAY_JOB_ID", in_job.job_id)
        job.config.run.name = f"slurm-{array}"
    elif job.config.run.name is None and in_job.job_id:
        job.config.run.name = in_job.job_id
    run = RunDirectory(job_directory(job.directory, task or 0, job.count))
    if not (in_job.job_id and run.config.exists() and _is_restarted(in_job, run)):
        job = replace(job, config=with_frozen_defaults(job.config, run, line, job.overrides))
        if is_slurm:
            check_signal(job.config, run)
        _freeze(job, run, trust_owner)
        if is_slurm:
            add_submission(run, "script", job_id=in_job.name)
        elif in_job.job_id:
            add_submission(run, "script", job_id=in_job.name, scheduler=ENVIRONMENT)
    return run


def _is_restarted(job: CurrentJob, run: RunDirectory) -> bool:
    if isinstance(job, SlurmJob):
        return job.restart > 0
    return job.name in job_ids((run.record().get("submissions") or [{}])[-1])


def _freeze(composed: ComposedJob, run: RunDirectory, trust_owner: bool) -> None:
    """Freezes a run for the job of the batch script around this process, or for a job to be submitted."""
    config = composed.config
    shape = None
    in_job = current_job()
    if in_job.nodes() is not None:
        shape = shape_in_script(config)
    job = check_job(config, run, shape, overrides=composed.overrides, trust_owner=trust_owner)
    print_notices(job, composed.line)
    freeze_job(replace(job, options=composed.line.options), composed.directory / "code")
    components = max(1, len(job.shape.components))
    text = by_hand(survives_node_loss(config.elastic), config.run.on_event, components)
    if isinstance(in_job, EnvironmentJob):
        text = f"{BY_VARIABLES}\n"
    write_text(run.job_script, text)
    write_text(run.gpus_script, f"{EXPORT}\n")


def check_signal(config: Config, run: RunDirectory) -> None:
    """Warns if the batch script around this process requests its signal too late to save. Raises UserError if it
    requests a signal that does not make the agents save."""
    script = None
    for process in psutil.Process().parents():
        with contextlib.suppress(psutil.Error, OSError):
            paths = [part for part in process.cmdline() if Path(part).name == SPOOLED]
            if paths and script is None:
                script = Path(paths[0]).read_text(errors="replace")
    if script is None:
        return
    needed = stop_time(config, run, int(os.environ.get("SLURM_JOB_NUM_NODES", "1")))
    warning = check_script_signal(script, needed)
    if warning is not None:
        print(warning, file=sys.stderr)


def print_script(arguments: list[str]) -> int:
    """Prints the script of the run that the overrides describe; on Kubernetes, the manifest.

    It writes no files and also works on a machine without Slurm, where the defaults of the partition are unknown. The
    script of another scheduler needs the run directory, which ``-m`` writes. Raises UserError if the config is wrong,
    lists several jobs, or is for this machine only."""
    parser = _parser("script", "Prints a batch script that trains the run that the overrides describe.")
    parser.add_argument("--explain", action="store_true", help="print the purpose of each line instead of the script")
    parser.add_argument("--json", action="store_true", help="print one JSON object with the script")
    options, rest = parser.parse_known_args(arguments)
    job = compose_job(parse_line(rest), "script", sweep="show the scripts of a sweep by launch.dry_run=true -m")
    blocks = _batch_script(job)
    rows = explanation(blocks)
    if options.json:
        explained = [{"first": first, "last": last, "reason": reason} for first, last, reason in rows]
        print(json.dumps({"script": text_of(blocks)} | ({"lines": explained} if options.explain else {})))
    elif options.explain:
        for first, last, reason in rows:
            print(f"{first if first == last else f'{first}-{last}':>9}  {reason}")
    else:
        print(text_of(blocks), end="")
    return 0


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    return OptionParser(
        prog=f"python -m hpc_train {name}",
        description=description,
        epilog="All other arguments are Hydra overrides and options, as for training.",
        allow_abbrev=False,
    )


def _batch_script(composed: ComposedJob) -> list[Block]:
    line = composed.line
    run = RunDirectory(composed.directory)
    config = with_frozen_defaults(composed.config, run, line, composed.overrides)
    cluster = config.cluster
    if cluster.kind == "local":
        fix = "cluster=slurm, or cluster=kubernetes"
        raise UserError("cluster.kind=local submits no script", where="cluster.kind", fix=fix)
    if config.launch.chain > 1:
        raise UserError(
            f"script takes one job, but launch.chain={config.launch.chain} makes a chain of jobs",
            where="launch.chain",
            fix="launch.chain=1, or submit the chain with -m",
        )
    if config.cluster.first:
        fix = "remove cluster.first, or submit the jobs with -m"
        raise UserError("script takes one job, but cluster.first adds further ones", where="cluster.first", fix=fix)
    if is_import_path(cluster.kind):
        executor = select_executor(cluster)
        job = check_job(config, run, overrides=composed.overrides)
        print_notices(job, line)
        ((_, script),) = executor.plan([job], composed.directory)
        purpose = f"what -m submits to {executor.name} after it has written {run.path}"
        print(f"note: this is {purpose}", file=sys.stderr)
        return [Block(purpose, script.splitlines())]
    site = read_site() if controller_answers() else NO_SITE
    check_architecture(cluster, site)
    shape = slurm_shape(config, lambda: site)
    job = check_job(config, run, shape, overrides=composed.overrides)
    print_notices(job, line)
    header = {"job-name": config.run.name or config.strategy.name, "output": "%x-%j.out"}
    if cluster.comment:
        header["comment"] = cluster.comment
    overrides = list(line.overrides)
    if line.config_directory:
        overrides.append(f"--config-dir={line.config_directory}")
    container = container_of(config, job.gpus)
    batch_script = Script(
        f"hpc_train, {config.strategy.name}: {job.layout}",
        cluster,
        freezing(cluster, overrides, container),
        [header | found for found in options_of_components(job, site)],
        container=container,
        notes=[note for note in (stop_note(job), asked_gpus(cluster, site).note) if note],
        survives_node_loss=survives_node_loss(config.elastic),
        on_event=config.run.on_event,
        components=max(1, len(job.shape.components)),
    )
    return blocks_of(batch_script)
