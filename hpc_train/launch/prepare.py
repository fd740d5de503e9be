"""From a composed config to a checked job, and what is said of it before it is submitted."""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import DictConfig
from rich.console import Console

from hpc_train.config.cluster_size import fewest_nodes
from hpc_train.config.compose import typed
from hpc_train.config.validate import validate
from hpc_train.launch.job import Job
from hpc_train.launch.place import choose
from hpc_train.launch.submitter import Submitter
from hpc_train.run.directory import RunDirectory


def prepare(node: DictConfig, run: RunDirectory, number: int = 0, overrides: Sequence[str] = ()) -> Job:
    """The job that ``node`` describes; writes nothing.

    Raises:
        ConfigError: it is wrong, or cannot run where it would go.
    """
    config = typed(node)
    nodes, gpus, workers = choose(config.cluster).shape(config.cluster)
    layout = validate(config, nodes, workers)
    fewest = fewest_nodes(config)
    if fewest < nodes:
        validate(config, fewest, workers)  # what it gets, or is left with, must do in any case
    return Job(number, tuple(overrides), config, layout, gpus, workers, run)


def announce(job: Job, submitter: Submitter, console: Console, job_id: str | None = None) -> None:
    """Says what ``job`` is and where it goes, or has gone under ``job_id``."""
    device = f"{job.gpus} GPUs per node" if job.gpus else "on CPUs"
    place = f"{submitter.name}, job id {job_id}" if job_id else submitter.name
    lines = [f"job {job.number}: {job.config.strategy.name}: {job.layout}, {device}; {place}", f"  {job.run.path}"]
    lines += [f"  note: {note}" for note in job.layout.notes]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
