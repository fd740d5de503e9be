"""Describes a checked job, which can be frozen and submitted, and estimates the memory that it needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, lru_cache
from typing import Protocol

from hpc_train.config.schema import Config
from hpc_train.config.values import fewest_nodes, node_range
from hpc_train.errors import UserError
from hpc_train.launch.gpus import depends_on_gpu_types, gpu_types_here
from hpc_train.layout.layout import JobShape, Layout, Place
from hpc_train.layout.memory import Memory, estimate, needed_bytes, reserved_bytes
from hpc_train.machine.allocation import workers_of_run
from hpc_train.machine.gpus import gpu_memory
from hpc_train.run.directory import RunDirectory
from hpc_train.run.owner import TRUST
from hpc_train.schedulers.slurm.client import in_allocation
from hpc_train.units import format_bytes


class Choice(Protocol):
    """The layout that ``strategy=auto`` has chosen for a job.

    Attributes:
        text: the content of ``plan.json``.
        lines: a line with the choice, and a line for each other number of nodes.
    """

    @property
    def text(self) -> str: ...

    @property
    def lines(self) -> list[str]: ...

    def apply(self, config: Config) -> Config:
        """Returns ``config`` with the chosen layout."""


@dataclass(frozen=True)
class MemoryNeed:
    """Holds the estimated memory of a job.

    Attributes:
        rank: the memory of the tensors on the rank that needs the most.
        needed: the bytes that a GPU must have or, on CPUs, the bytes that the machine must have for all ranks.
        available: the bytes that it has; None if unknown.
        place: the name of the GPU or machine in messages.
    """

    rank: Memory
    needed: float
    available: float | None
    place: str

    @property
    def exceeds(self) -> bool:
        return self.available is not None and self.needed > self.available


@dataclass(frozen=True)
class Job:
    """A validated job.

    Attributes:
        number: its number in the sweep, from 0.
        overrides: the overrides of its command line.
        options: the options of its command line that choose config files, such as ``-cd DIR``.
        trust_owner: whether its agents may continue a run that belongs to another user.
        choice: the choice of ``strategy=auto``, if it chose the layout.
    """

    config: Config
    layout: Layout
    shape: JobShape
    run: RunDirectory
    _: KW_ONLY
    number: int = 0
    overrides: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    trust_owner: bool = False
    choice: Choice | None = None

    @property
    def gpus(self) -> int:
        """The GPUs per node."""
        return self.shape.gpus

    @property
    def workers(self) -> int:
        """The workers per node."""
        return self.shape.workers

    @cached_property
    def memory(self) -> MemoryNeed | None:
        """The estimated memory of the job; None if the sizes of the model are unknown."""
        rank = estimate(self.config, self.layout)
        if rank is None:
            return None
        here = self.shape.place is Place.MACHINE
        if not self.shape.gpus:
            total = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
            available = total if here else None
            return MemoryNeed(rank, rank.total * self.layout.world_size, available, "this machine")
        device_bytes = self.shape.device_bytes
        gpu_type = self.config.cluster.gpu_type
        if device_bytes is None and (gpu_type is not None or here):
            device_bytes = _memory_of_gpu(gpu_type)
        return MemoryNeed(rank, needed_bytes(rank.total, reserved_bytes(self.layout)), device_bytes, "a GPU")

    @property
    def agent_options(self) -> tuple[str, ...]:
        """The options of ``python -m hpc_train agent``."""
        return (TRUST,) if self.trust_owner else ()

    @property
    def strategy(self) -> str:
        return self.config.strategy.name

    @property
    def asked_nodes(self) -> int | str:
        return self.config.cluster.nodes

    @property
    def plan(self) -> str | None:
        """Returns the text of ``plan.json``."""
        return None if self.choice is None else self.choice.text


@contextmanager
def alternative_named(number: int) -> Iterator[None]:
    """Names job ``number`` of ``cluster.first`` in a UserError that the block raises; 0 is the job without it."""
    try:
        yield
    except UserError as error:
        if number == 0:
            raise
        what = f"job {number} of cluster.first: {error.what}"
        raise UserError(what, where=f"cluster.first, {error.where}", fix=error.fix) from error


def local_shape(config: Config, place: Place) -> JobShape:
    """Returns the shape of a job on this machine.

    Raises UserError if more nodes or GPUs are requested than this machine has.
    """
    cluster = config.cluster
    if node_range(cluster) != (1, 1):
        raise UserError(
            f"{cluster.nodes} nodes are requested, but jobs run on this machine only",
            where="cluster.nodes",
            fix="cluster.nodes=1, or submit to Slurm from a login node",
        )
    gpus, workers = workers_of_run(config)
    return JobShape(
        nodes=1,
        fewest_nodes=fewest_nodes(config),
        gpus=gpus,
        workers=workers,
        place=place,
        in_job=in_allocation(),
        gpu_types=gpu_types_here(cluster) if depends_on_gpu_types(config, gpus) else frozenset(),
    )


_memory_of_gpu = lru_cache(maxsize=8)(gpu_memory)  # it may start nvidia-smi, so it is called once per sweep


def with_memory_note(job: Job) -> Job:
    """Returns ``job`` with a note in its layout if it will probably run out of memory."""
    need = job.memory
    if need is None or need.available is None or not need.exceeds:
        return job
    note = (
        f"the run will probably run out of memory: it needs about {format_bytes(need.needed)} of the "
        f"{format_bytes(need.available)} of {need.place}"
    )
    return replace(job, layout=replace(job.layout, notes=(*job.layout.notes, note)))
