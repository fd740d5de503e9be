"""Compares the estimated memory of a job with that of its GPUs or of this machine, if that is known."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

from hpc_train.config.schema import Config
from hpc_train.launch.executors.executor import Executor
from hpc_train.layout.layout import Layout
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


def memory_need(config: Config, layout: Layout, executor: Executor, gpus: int) -> MemoryNeed | None:
    """Returns the memory of a job with ``gpus`` GPUs per node; None if the sizes of the model are unknown."""
    rank = estimate(config, layout)
    if rank is None:
        return None
    here = executor.name == "this machine"
    if not gpus:
        return MemoryNeed(rank, rank.total * layout.world_size, _of_this_machine() if here else None, "this machine")
    available = executor.device_bytes(config.cluster)
    if available is None and (config.cluster.gpu_type is not None or here):
        available = _of_gpu(config.cluster.gpu_type)
    return MemoryNeed(rank, needed_bytes(rank.total), available, "a GPU")


@lru_cache(maxsize=8)
def _of_gpu(kind: str | None) -> float | None:
    """Returns ``gpu_memory``, which may start nvidia-smi, once for all jobs of a sweep."""
    return gpu_memory(kind)


def _of_this_machine() -> float:
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
