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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from hpc_train.checkpoint.space import stop_time
from hpc_train.config.arguments import expand, refuse_search, with_right_plus
from hpc_train.config.command_line import CommandLine
from hpc_train.config.compose import typed
from hpc_train.config.mistakes import own_files_checked
from hpc_train.config.run_path import job_directory, run_directory
from hpc_train.config.schema import ClusterConfig, Config
from hpc_train.config.values import fewest_nodes, node_range
from hpc_train.errors import UserError, check_all
from hpc_train.launch.container import container_of
from hpc_train.launch.executors.executor import Job
from hpc_train.launch.executors.select import controller_answers, select_executor
from hpc_train.launch.gpus import (
    asked_gpu_memory,
    asked_gpu_types,
    asked_gpus,
    gpu_export_lines,
    gpu_types_here,
    gpus_of_this_job,
)
from hpc_train.launch.launcher import register_launcher
from hpc_train.launch.sbatch import NO_SITE, options, refuse_lost_signal, short_lead, stop_note, survives_node_loss
from hpc_train.launch.script import Script, by_hand, freezing, render
from hpc_train.launch.submission import with_layout
from hpc_train.layout.validate import validate
from hpc_train.machine.allocation import refuse_components, workers_per_node
from hpc_train.machine.gpus import gpu_memory, visible_gpus
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import write_text
from hpc_train.run.freeze import check_freeze, freeze
from hpc_train.run.imported import with_imported_model
from hpc_train.run.lease import add_submission
from hpc_train.run.owner import TRUST, warn_if_open
from hpc_train.run.snapshot import snapshot_code
from hpc_train.schedulers.slurm.client import own_job
from hpc_train.schedulers.slurm.site import read_site

SPOOLED = "slurm_script"  # slurmd's copy of a batch script


def freeze_run(arguments: list[str]) -> int:
    """Freezes the run that the overrides describe; with ``--task N``, freezes job N of a sweep.

    A requeued script finds the directory unchanged, even if the configs were edited since. The directory also holds
    ``job.sh``, which starts the agents and requeues the job if they ask for it, and ``gpus.sh``, which passes the GPUs
    of the job on to its steps, for scripts that start the agents themselves.

    Raises:
        UserError: the config is wrong, lists several jobs, or the run may not be frozen.
    """
    parser = _parser("freeze", "Writes the directory of the run that the overrides describe, and prints its path.")
    parser.add_argument("--task", type=int, metavar="N", help="freeze job N of the sweep that the overrides describe")
    parser.add_argument(TRUST, action="store_true", help="use a run directory that belongs to another user")
    parser.add_argument("--json", action="store_true", help="print one JSON object with the path")
    options, rest = parser.parse_known_args(arguments)
    refuse_components()
    register_launcher()
    line = CommandLine.parse(with_imported_model(with_right_plus(rest)))
    refuse_search(line, "freeze")
    jobs = expand(line.overrides)
    overrides = _overrides_of_task(jobs, options.task, line.multirun)
    with own_files_checked(line), line.composer() as compose:
        config = typed(compose(overrides))
    job_id = os.environ.get("SLURM_JOB_ID")
    if config.run.name is None and job_id is not None:
        # the name survives a requeue, and the tasks of an array share one parent directory
        config.run.name = f"slurm-{job_id if options.task is None else os.environ.get('SLURM_ARRAY_JOB_ID', job_id)}"
    parent = Path(run_directory(config.run.root, config.run.name, config.run.fork))
    run = RunDirectory(job_directory(parent, options.task or 0, len(jobs)))
    if not (int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0 and run.config.exists()):
        if job_id is not None:
            check_signal(config, run)
        _freeze(config, run, parent, overrides, options.trust_owner)
        if job_id is not None:
            add_submission(run, "script", job_id=own_job())
    print(json.dumps({"run": str(run.path)}) if options.json else run.path)
    return 0


def _overrides_of_task(jobs: list[list[str]], task: int | None, multirun: bool) -> list[str]:
    if task is None:
        if multirun or len(jobs) > 1:
            raise UserError(
                f"freeze writes one run, but the overrides describe a sweep of {len(jobs)}",
                where="the command line",
                fix="give each key one value and drop -m, or add --task N to freeze job N of the sweep",
            )
        return jobs[0]
    if not 0 <= task < len(jobs):
        raise UserError(
            f"the sweep has {len(jobs)} jobs, so there is no job {task}",
            where="--task",
            fix=f"use 0 to {len(jobs) - 1}, e.g. with sbatch --array=0-{len(jobs) - 1}",
        )
    return jobs[task]


def _freeze(config: Config, run: RunDirectory, parent: Path, overrides: Sequence[str], trust_owner: bool) -> None:
    place = _place(config)
    config, choice = with_layout(config, run, lambda: (place.nodes, place.gpus, place.workers), place.gpu_types)
    asked = (place.nodes, place.workers, place.device_bytes)
    check_all(lambda: validate(config, *asked), lambda: check_freeze(config, run, trust_owner))
    plan = None if choice is None else choice.text
    code = snapshot_code([config], parent / "code")
    freeze(config, run, code=code, overrides=overrides, plan=plan, trust_owner=trust_owner)
    warn_if_open(run, config)
    write_text(run.job_script, by_hand(survives_node_loss(config.elastic)))
    write_text(run.gpus_script, "".join(f"{line}\n" for line in gpu_export_lines()))


def check_signal(config: Config, run: RunDirectory) -> None:
    """Warns if the batch script around this process requests its signal too late to save.

    Raises:
        UserError: it requests a signal that does not make the agents save.
    """
    script = _script_around()
    if script is None:
        return
    needed = stop_time(config, run, int(os.environ.get("SLURM_JOB_NUM_NODES", "1")))
    refuse_lost_signal(script, needed)
    warning = short_lead(script, needed)
    if warning is not None:
        print(warning, file=sys.stderr)


def _script_around() -> str | None:
    """Returns the text of the batch script that has started this process; None if it cannot be found."""
    for process in psutil.Process().parents():
        with contextlib.suppress(psutil.Error, OSError):
            for part in process.cmdline():
                if Path(part).name == SPOOLED:
                    return Path(part).read_text(errors="replace")
    return None


@dataclass(frozen=True)
class _Place:
    """Describes where a frozen run will train: nodes without spares, and GPUs and workers per node.

    Attributes:
        device_bytes: the memory of a GPU; None if unknown.
    """

    nodes: int
    gpus: int
    workers: int
    device_bytes: float | None
    gpu_types: Callable[[ClusterConfig], frozenset[str]]


def _place(config: Config) -> _Place:
    """Returns the place of this Slurm job, or of the job to be submitted."""
    nodes = os.environ.get("SLURM_JOB_NUM_NODES")
    if nodes is not None:
        # this counts the GPUs that Slurm has allocated; the agents check later whether the nodes can use them
        gpus = gpus_of_this_job().per_node or visible_gpus()
        size, workers = max(1, int(nodes) - config.elastic.spares), workers_per_node(config.cluster, gpus)[1]
        asks = size > 1 and gpus and config.cluster.gpus_per_node != 0 and config.strategy.pp == "auto"
        used = 0 if config.cluster.gpus_per_node == 0 else gpus
        return _Place(size, used, workers, gpu_memory(None) if asks else None, gpu_types_here)
    executor = select_executor(config.cluster)
    return _Place(*executor.shape(config.cluster), executor.device_bytes(config.cluster), executor.gpu_types)


def print_script(arguments: list[str]) -> int:
    """Prints the script of the run that the overrides describe.

    It writes no files and also works on a machine without Slurm, where the defaults of the partition are unknown.

    Raises:
        UserError: the config is wrong, lists several jobs, or is for this machine only.
    """
    parser = _parser("script", "Prints a batch script that trains the run that the overrides describe.")
    parser.add_argument("--json", action="store_true", help="print one JSON object with the script")
    options, rest = parser.parse_known_args(arguments)
    register_launcher()
    line = CommandLine.parse(with_imported_model(with_right_plus(rest)))
    if line.multirun or len(expand(line.overrides)) > 1:
        raise UserError(
            "script prints one job, but the overrides describe a sweep",
            where="the command line",
            fix="give each key one value and drop -m; launch.dry_run=true -m shows the scripts of a sweep",
        )
    with line.composer() as compose:
        config = typed(compose(line.overrides))
    text = _batch_script(config, line)
    print(json.dumps({"script": text}) + "\n" if options.json else text, end="")
    return 0


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"python -m hpc_train {name}",
        description=description,
        epilog="All other arguments are Hydra overrides and options, as for training.",
        allow_abbrev=False,
    )


def _batch_script(config: Config, line: CommandLine) -> str:
    cluster = config.cluster
    if cluster.kind == "local":
        raise UserError("a batch script needs Slurm, got cluster.kind=local", where="cluster.kind", fix="cluster=slurm")
    if config.launch.chain > 1:
        raise UserError(
            f"script prints one job, but launch.chain={config.launch.chain} makes a chain of jobs",
            where="launch.chain",
            fix="launch.chain=1, or submit the chain with -m",
        )
    site = read_site() if controller_answers() else NO_SITE
    asked = asked_gpus(cluster, site)
    gpus, workers = workers_per_node(cluster, visible=asked.count)
    device_bytes = asked_gpu_memory(cluster, site) if gpus else None
    sizes = (node_range(cluster)[1], fewest_nodes(config))
    directory = RunDirectory(Path(run_directory(config.run.root, config.run.name, config.run.fork)))
    shape = (sizes[0], gpus, workers)
    config, choice = with_layout(config, directory, lambda: shape, lambda cluster: asked_gpu_types(cluster, site))
    layout, *_ = [validate(config, nodes, workers, device_bytes) for nodes in sizes]
    job = Job(0, line.overrides, config, layout, gpus, workers, directory, choice=choice)
    name = config.run.name or config.strategy.name
    comment = {"comment": cluster.comment} if cluster.comment else {}
    header = {
        "job-name": cluster.job_name or f"hpc_train-{name}",
        "output": "%x-%j.out",
        **comment,
        **options(job, site),
    }
    overrides = [*line.overrides, *([f"--config-dir={line.config_directory}"] if line.config_directory else [])]
    container = container_of(config, gpus)
    run = freezing(cluster, overrides, container)
    title = f"hpc_train, {config.strategy.name}: {layout}"
    notes = [stop_note(job), *([asked.note] if asked.note else [])]
    script = Script(
        title,
        cluster,
        run,
        header,
        container=container,
        notes=notes,
        survives_node_loss=survives_node_loss(config.elastic),
    )
    return render(script)
