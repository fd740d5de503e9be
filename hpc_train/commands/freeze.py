"""``python -m hpc_train freeze`` writes a run directory and prints its path; batch scripts call it before ``srun``.

The command is idempotent: a requeued script finds the directory unchanged, even if the configs were edited since.
The directory also holds ``job.sh``, which starts the agents and requeues the job if they ask for it, and ``gpus.sh``,
which passes the GPUs of the job on to its steps, for scripts that start the agents themselves.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from hpc_train.cluster.allocation import workers_per_node
from hpc_train.cluster.gpus import visible_gpus
from hpc_train.config.arguments import CommandLine, expand, with_right_plus
from hpc_train.config.compose import typed
from hpc_train.config.run_path import job_directory, run_directory
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.launch.executors.select import select_executor
from hpc_train.launch.gpus import gpu_export_lines, gpus_of_this_job
from hpc_train.launch.launcher import register_launcher
from hpc_train.launch.sbatch import goes_on_without_a_node
from hpc_train.launch.script import by_hand
from hpc_train.plan.validate import validate
from hpc_train.run.code import snapshot_code
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import write_text
from hpc_train.run.freeze import check_freeze, freeze
from hpc_train.run.lease import add_submission


def main(arguments: list[str]) -> int:
    """Freezes the run that the overrides describe; with ``--task N``, freezes job N of a sweep.

    Raises:
        UserError: the config is wrong, lists several jobs, or the run may not be frozen.
    """
    parser = argparse.ArgumentParser(prog="python -m hpc_train freeze", add_help=False, allow_abbrev=False)
    parser.add_argument("--task", type=int)
    options, rest = parser.parse_known_args(arguments)
    register_launcher()
    line = CommandLine.parse(with_right_plus(rest))
    jobs = expand(line.overrides)
    overrides = _overrides_of_task(jobs, options.task, line.multirun)
    with line.composer() as compose:
        config = typed(compose(overrides))
    job_id = os.environ.get("SLURM_JOB_ID")
    if config.run.name is None and job_id is not None:
        # the name survives a requeue, and the tasks of an array share one parent directory
        config.run.name = f"slurm-{job_id if options.task is None else os.environ.get('SLURM_ARRAY_JOB_ID', job_id)}"
    parent = Path(run_directory(config.run.root, config.run.name, config.run.fork))
    run = RunDirectory(job_directory(parent, options.task or 0, len(jobs)))
    if not (int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0 and run.config.exists()):
        _freeze(config, run, parent)
        if job_id is not None:
            add_submission(run, "script", job_id=job_id)
    print(run.path)
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


def _freeze(config: Config, run: RunDirectory, parent: Path) -> None:
    validate(config, *_nodes_and_workers(config))
    check_freeze(config, run)
    freeze(config, run, code=snapshot_code([config], parent / "code"))
    write_text(run.job_script, by_hand(goes_on_without_a_node(config.elastic)))
    write_text(run.gpus_script, "".join(f"{line}\n" for line in gpu_export_lines()))


def _nodes_and_workers(config: Config) -> tuple[int, int]:
    """Returns the nodes without spares and the workers per node of this Slurm job, or of the job to be submitted."""
    nodes = os.environ.get("SLURM_JOB_NUM_NODES")
    if nodes is not None:
        # this counts the GPUs that Slurm has allocated; the agents check later whether the nodes can use them
        gpus = gpus_of_this_job().per_node or visible_gpus()
        return max(1, int(nodes) - config.elastic.spares), workers_per_node(config.cluster, gpus)[1]
    asked, _, workers = select_executor(config.cluster).shape(config.cluster)
    return asked, workers
