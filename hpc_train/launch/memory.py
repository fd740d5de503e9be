"""Compares the estimated memory of a job with that of its GPUs or of this machine, if that is known."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import lru_cache

from hpc_train.config.schema import Config
from hpc_train.launch.job import Job
from hpc_train.layout.layout import JobShape, Layout, Place
from hpc_train.layout.memory import Memory, estimate, needed_bytes
from hpc_train.machine.gpus import gpu_memory
from hpc_train.units import format_bytes


@dataclass(frozen=True)
class MemoryNeed:
    """Holds the estimated memory of a job.

    Attributes:
        rank: that of the rank that needs most, in tensors.
        needed: the bytes that a GPU must have, or without GPUs the machine for all ranks.
        available: the bytes that it has; None if unknown.
        place: what must have them.
    """

    rank: Memory
    needed: float
    available: float | None
    place: str

    @property
    def exceeds(self) -> bool:
        return self.available is not None and self.needed > self.available

    @property
    def note(self) -> str:
        """Returns the notice about a job that does not fit."""
        assert self.available is not None
        return (
            f"the run will probably run out of memory: it needs about {format_bytes(self.needed)} of the "
            f"{format_bytes(self.available)} of {self.place}"
        )


def memory_need(config: Config, layout: Layout, shape: JobShape) -> MemoryNeed | None:
    """Returns the memory of a job; None if the sizes of the model are unknown."""
    rank = estimate(config, layout)
    if rank is None:
        return None
    here = shape.place is Place.MACHINE
    if not shape.gpus:
        return MemoryNeed(rank, rank.total * layout.world_size, _of_this_machine() if here else None, "this machine")
    available = shape.device_bytes
    if available is None and (config.cluster.gpu_type is not None or here):
        available = _of_gpu(config.cluster.gpu_type)
    return MemoryNeed(rank, needed_bytes(rank.total), available, "a GPU")


def with_memory_note(job: Job) -> Job:
    """Returns ``job`` with a note in its layout if it will probably run out of memory."""
    need = memory_need(job.config, job.layout, job.shape)
    if need is None or not need.exceeds:
        return job
    return replace(job, layout=replace(job.layout, notes=(*job.layout.notes, need.note)))


@lru_cache(maxsize=8)
def _of_gpu(kind: str | None) -> float | None:
    """Returns ``gpu_memory``, which may start nvidia-smi, once for all jobs of a sweep."""
    return gpu_memory(kind)


def _of_this_machine() -> float:
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
