"""When the rows of a plan would start and be done, for a config that submits to Slurm."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpc_train.commands.plan.rows import Row
from hpc_train.config.schema import Config
from hpc_train.launch.job import Job
from hpc_train.launch.sbatch import arguments, options
from hpc_train.layout.layout import JobShape, Place
from hpc_train.planner.candidates import with_values
from hpc_train.run.directory import RunDirectory
from hpc_train.schedulers.slurm.client import SlurmError
from hpc_train.schedulers.slurm.queue_estimate import Start, accuracy_of, read_estimates, starts_of
from hpc_train.schedulers.slurm.site import Site, read_site

WITHOUT_EFFECT = ("signal", "requeue", "no-requeue", "no-kill", "open-mode", "mail-user", "mail-type")  # on the start


def with_starts(rows: Sequence[Row], config: Config, sort: str) -> tuple[list[Row], list[str]]:
    """Returns the rows with their starts, and lines about them. Sorted by time, the row that is done first is first.

    If Slurm does not respond, the rows are returned as they are, with one line that says so.
    """
    site = read_site()
    if not site.partitions:
        return [*rows], ["the start in the queue is unknown: Slurm does not respond (scontrol show partition)"]
    shapes = [_shape(row, config, site) for row in rows]
    try:
        found = starts_of(shapes)
    except SlurmError as error:
        return [*rows], [f"the start in the queue is unknown: {error.what}"]
    started = [replace(row, start=found[shape]) for row, shape in zip(rows, shapes, strict=True)]
    if sort == "time" and all(row.done is not None or row.refused for row in started):
        started.sort(key=lambda row: row.done or float("inf"))
    return started, [*_refusals(started), *_about_the_estimates(config, site)]


def _shape(row: Row, config: Config, site: Site) -> tuple[str, ...]:
    """Returns the options of sbatch for a row that determine when its job starts."""
    chosen = with_values(config, {**row.candidate.values, "cluster.nodes": row.candidate.nodes})
    workers = row.candidate.devices // row.candidate.nodes
    gpus = 0 if config.cluster.gpus_per_node == 0 else workers
    nodes = row.candidate.nodes
    shape = JobShape(nodes, nodes, gpus, workers, Place.SLURM, in_job=True)
    run = RunDirectory(Path(config.run.root, "plan"))  # is not created
    asked = options(Job(0, (), chosen, row.candidate.layout, shape, run), site)
    return tuple(arguments({name: value for name, value in asked.items() if name not in WITHOUT_EFFECT}))


def _refusals(rows: Sequence[Row]) -> list[str]:
    """Returns a line for each number of devices that Slurm refuses."""
    refused: Mapping[int, Start] = {row.candidate.devices: row.start for row in rows if row.start and row.refused}
    return [f"Slurm refuses {devices} GPUs: {start.refusal.splitlines()[-1]}" for devices, start in refused.items()]


def _about_the_estimates(config: Config, site: Site) -> list[str]:
    asked = f"starts: as Slurm estimates at {time.strftime('%H:%M')}"
    recorded = read_estimates(Path(config.run.root), site.name, config.cluster.partition)
    accuracy = accuracy_of(recorded)
    if accuracy is not None:
        return [f"{asked}; {accuracy}"]
    return [f"{asked}; how far off its estimates are is known after three jobs here have started"]
