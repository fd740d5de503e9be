"""Starts slow work in the background before the imports of the commands that train.

A command that runs an agent in this process starts the import of torch. A submission to Slurm starts the queries for
the limits of the site and imports no torch. A command that only shows something starts nothing.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_train.elastic.warm_parent.head_start import head_start
from hpc_train.run.directory import RunDirectory

OPTIONS = ("--json", "-cd", "--config-dir", "-cn", "--config-name", "-cp", "--config-path")
# overrides with which this process starts no worker
ELSEWHERE = re.compile(r"\+{0,2}(cluster(\.kind)?=slurm|hydra\.mode=|run\.command=|launch\.dry_run=(?!false))")
SUBMIT = {"-m", "--multirun"}
HERE = ("cluster=local", "cluster.kind=local")
DEFAULTS = {"cluster.cpu_workers": "4", "cluster.gpus_per_node": "auto", "train.threads": "auto"}


def train(arguments: list[str]) -> int:
    """Trains in the foreground, or submits with ``-m``; see ``hpc_train.commands.train``."""
    if submits(arguments):
        from hpc_train.schedulers.slurm.site import begun_site

        begun_site()
    threads = None
    if trains_here(arguments):
        overrides = (word.lstrip("+").split("=", 1) for word in arguments if "=" in word)
        threads = threads_of_worker(dict(overrides))
    with head_start(threads) as begun:
        from hpc_train.commands.train import main

        return main(arguments, begun)


def agent(arguments: list[str]) -> int:
    """Runs the agent of this node; see ``hpc_train.commands.agent``."""
    with head_start(_threads_of_frozen(arguments)) as begun:
        from hpc_train.commands.agent import start_agent

        return start_agent(arguments, begun)


def trains_here(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether a command line probably trains in this process, on a machine that is meant for it."""
    if any((word.startswith("-") and word not in OPTIONS) or ELSEWHERE.match(word) for word in arguments):
        return False
    is_node = "SLURMD_NODENAME" in environment or shutil.which("sbatch", path=environment.get("PATH")) is None
    return is_node or any(word in HERE for word in arguments)


def submits(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether a command line probably submits to Slurm, with ``-m`` outside of a job."""
    if SUBMIT.isdisjoint(arguments) or any(word in HERE for word in arguments) or "SLURM_JOB_ID" in environment:
        return False
    return shutil.which("sbatch", path=environment.get("PATH")) is not None


def threads_of_worker(values: Mapping[str, str]) -> int:
    """Returns the threads that a worker of this node will probably have with these ``values`` of config keys."""
    values = {**DEFAULTS, **values}
    threads = values["train.threads"]
    if threads.isdecimal():
        return max(1, int(threads))
    count = 1  # workers
    if values["cluster.cpu_workers"].isdecimal():
        count = int(values["cluster.cpu_workers"])
    gpus = values["cluster.gpus_per_node"]
    if gpus.isdecimal():
        count = int(gpus) or count
    else:
        from hpc_train.machine.gpus import visible_devices  # a node without GPUs may not need it

        count = len(visible_devices()) or count
    return max(1, len(os.sched_getaffinity(0)) // max(1, count))


def _threads_of_frozen(arguments: Sequence[str]) -> int | None:
    """Returns the threads of a worker of the run that an agent is to run; None if it has no worker."""
    runs = (RunDirectory(Path(word)) for word in arguments)
    run = next((run for run in runs if run.config.is_file()), None)
    if run is None:
        return None
    config = run.plain_config("cluster", "run", "train")
    if config.get("run", {}).get("command", "") is not None:
        return None
    values = {
        f"{group}.{name}": str(value) for group in ("cluster", "train") for name, value in config.get(group, {}).items()
    }
    return threads_of_worker(values)
