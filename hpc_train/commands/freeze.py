"""Writes a run directory and prints its path: what batch scripts call before they start agents with ``srun``.

Idempotent: a script that Slurm has started again finds the directory as it was, whatever has been edited since.
"""

from __future__ import annotations

import os
from pathlib import Path

from hpc_train.cluster.allocation import workers_per_node
from hpc_train.commands.train import register_launcher
from hpc_train.config.arguments import CommandLine, expand, with_right_plus
from hpc_train.config.compose import typed
from hpc_train.config.directory import run_directory
from hpc_train.config.errors import ConfigError
from hpc_train.config.freeze import freeze
from hpc_train.config.schema import ClusterConfig
from hpc_train.config.validate import validate
from hpc_train.launch.submitter import choose
from hpc_train.run import submissions
from hpc_train.run.directory import RunDirectory


def main(arguments: list[str]) -> int:
    """Freezes one run from overrides, as ``python -m hpc_train`` takes them.

    Raises:
        ConfigError: the config is wrong, lists several jobs, or the run may not be frozen.
    """
    register_launcher()
    line = CommandLine.parse(with_right_plus(arguments))
    if line.multirun or len(expand(line.overrides)) > 1:
        raise ConfigError("freeze makes one run", where="the command line", mend="one value for each key, and no -m")
    with line.composer() as compose:
        config = typed(compose(line.overrides))
    job_id = os.environ.get("SLURM_JOB_ID")
    if config.run.name is None and job_id is not None:
        config.run.name = f"slurm-{job_id}"  # the same when Slurm starts the script again
    run = RunDirectory(Path(run_directory(config.run.root, config.run.name, config.run.fork)))
    if not (int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0 and run.config.exists()):
        validate(config, *_nodes_and_workers(config.cluster))
        freeze(config, run)
        if job_id is not None:
            submissions.add(run, "script", job_id=job_id)
    print(run.path)
    return 0


def _nodes_and_workers(cluster: ClusterConfig) -> tuple[int, int]:
    """Of the Slurm job that the script runs in; outside of one, of where the run would be submitted."""
    nodes = os.environ.get("SLURM_JOB_NUM_NODES")
    if nodes is not None:
        return int(nodes), workers_per_node(cluster)[1]
    asked, _, workers = choose(cluster).shape(cluster)
    return asked, workers
