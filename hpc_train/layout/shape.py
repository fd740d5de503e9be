"""The shape of a job: the resources that it gets, and where it runs. This module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Place(StrEnum):
    """Where a job runs."""

    FOREGROUND = "the foreground"
    MACHINE = "this machine"  # as a process that ``-m`` starts
    ALLOCATION = "this allocation"  # as steps of the Slurm job around the command
    SLURM = "Slurm"  # as a job of its own, or of the batch script around the command


@dataclass(frozen=True)
class JobShape:
    """The resources of a job, and where it runs.

    Attributes:
        nodes: the largest number of nodes that train, without spares.
        fewest_nodes: the smallest number on which the run must fit, at its start or after it loses nodes.
        gpus: per node; 0 trains on CPUs.
        workers: per node.
        place: where it runs.
        in_job: whether that is inside of a Slurm job.
        device_bytes: the memory of the smallest GPU of a job on several nodes; None if it is unknown.
        gpu_types: the types of GPUs that the job may get, if the config depends on them; empty if they are unknown.
    """

    nodes: int
    fewest_nodes: int
    gpus: int
    workers: int
    place: Place = Place.FOREGROUND
    in_job: bool = False
    device_bytes: float | None = None
    gpu_types: frozenset[str] = frozenset()
