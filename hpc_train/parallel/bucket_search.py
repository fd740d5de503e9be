"""Tries sizes of gradient buckets in the first steps and keeps the fastest (``strategy.bucket_cap_mb=auto``).

The gradients are the same sums with every size, so the steps of the search are steps of the training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from hpc_train.config.schema import Config
from hpc_train.parallel.compression.build import Compression
from hpc_train.parallel.engine import Replicas
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.plain_objects import broadcast_plain
from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import EventLog

SIZES_MB = (1.0, 5.0, 25.0, 100.0)
WARM_UP = 2  # untimed steps of each size, since DDP rebuilds its buckets after the first
COUNTED = 3  # timed steps of each size
MOST_STEPS = WARM_UP + len(SIZES_MB) * (WARM_UP + COUNTED)


@dataclass(frozen=True)
class BucketChoice:
    """Holds the chosen size; ``seconds`` maps each size to the median step time on the slowest rank."""

    cap_mb: float
    seconds: Mapping[float, float]

    def __str__(self) -> str:
        tried = ", ".join(f"{size:g} MiB {1e3 * seconds:.1f} ms" for size, seconds in self.seconds.items())
        return f"strategy.bucket_cap_mb=auto chooses {self.cap_mb:g} MiB; the measured steps take: {tried}"


ReportBuckets = Callable[[BucketChoice], None]


class BucketedReplicas(Replicas, Protocol):
    """The interface of replicas whose bucket size can change between two steps."""

    def rebucket(self, cap_mb: float) -> None: ...


class SearchedReplicas:
    """Runs ``replicas`` with each bucket size in turn and then with the fastest. All ranks use the same size.

    Args:
        report: called once on every rank.
    """

    def __init__(self, replicas: BucketedReplicas, mesh: Mesh, report: ReportBuckets | None) -> None:
        self._replicas, self._mesh, self._report = replicas, mesh, report
        self._sizes = _sizes(replicas.module, mesh)
        self._seconds: list[list[float]] = [[] for _ in self._sizes]
        self._steps = -WARM_UP  # steps since the first timed size
        self._began = 0.0

    @property
    def module(self) -> nn.Module:
        return self._replicas.module

    @property
    def loss_factor(self) -> int:
        return self._replicas.loss_factor

    @property
    def compression(self) -> Compression | None:
        return self._replicas.compression

    @property
    def _searching(self) -> bool:
        return self._steps < len(self._sizes) * (WARM_UP + COUNTED)

    def begin(self, step: int, backwards: int) -> None:
        if self._searching and self._steps >= 0 and self._steps % (WARM_UP + COUNTED) == 0:
            self._replicas.rebucket(self._sizes[self._steps // (WARM_UP + COUNTED)])
        if self._searching:
            self._began = self._now()
        self._replicas.begin(step, backwards)

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        return self._replicas.micro_batch(last)

    def backward_done(self) -> None:
        self._replicas.backward_done()

    def finish(self) -> None:
        self._replicas.finish()
        if not self._searching:
            return
        size, step = divmod(self._steps, WARM_UP + COUNTED)
        if self._steps >= 0 and step >= WARM_UP:
            self._seconds[size].append(self._now() - self._began)
        self._steps += 1
        if not self._searching:
            self._conclude()

    def evaluated(self) -> None:
        self._replicas.evaluated()

    def _conclude(self) -> None:
        slowest = torch.tensor(self._seconds, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self._mesh.control)
        seconds = dict(zip(self._sizes, map(median, slowest.tolist()), strict=True))
        choice = BucketChoice(min(seconds, key=lambda size: seconds[size]), seconds)
        self._replicas.rebucket(choice.cap_mb)
        if self._report is not None:
            self._report(choice)

    def _now(self) -> float:
        """Returns the time after a synchronization with the device, which only the steps of the search need."""
        if self._mesh.device.type == "cuda":
            torch.cuda.synchronize(self._mesh.device)
        return time.perf_counter()


def _sizes(module: nn.Module, mesh: Mesh) -> list[float]:
    """Returns the sizes below the bytes of all gradients of the largest stage, and the next larger size."""
    own = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    total: Any = torch.tensor(own / mesh.layout.tp)
    dist.all_reduce(total, dist.ReduceOp.MAX, group=mesh.control)
    below = [size for size in SIZES_MB if size * 2**20 < total.item()]
    return list(SIZES_MB[: len(below) + 1])


def with_known_buckets(config: Config, run: RunDirectory, mesh: Mesh) -> Config:
    """Replaces ``auto`` by the bucket size that an earlier attempt in this layout has chosen. Collective."""
    if config.strategy.bucket_cap_mb != "auto":
        return config
    known = broadcast_plain(run.record().get("bucket_cap") if mesh.rank == 0 else None, mesh.control)
    if not known or known["layout"] != str(mesh.layout):
        return config
    return replace(config, strategy=replace(config.strategy, bucket_cap_mb=known["cap_mb"]))


def bucket_choice_recorder(run: RunDirectory, mesh: Mesh, events: EventLog) -> ReportBuckets:
    """Returns the callback with which rank 0 writes a bucket choice to the log, the events and ``run.json``."""

    def record(choice: BucketChoice) -> None:
        if mesh.rank != 0:
            return
        seconds = {f"{size:g}": value for size, value in choice.seconds.items()}
        found: dict[str, Any] = {"cap_mb": choice.cap_mb, "seconds": seconds}
        print(choice)
        events.record(run, bucket_cap={"layout": str(mesh.layout), **found})
        events.write("bucket_size_chosen", **found)

    return record
