"""Predicted against measured: what ``pp_split=flops|measured`` comes to in the first steps of an attempt."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.data.dataset import StepBatch
from hpc_train.measure.shares import timed_stages
from hpc_train.parallel.balance import SplitPlan
from hpc_train.parallel.engine import Engine, StepResult, WrappedEngine
from hpc_train.parallel.mesh import Mesh

WARMUP, LOOKED_AT = 2, 3  # steps

Tell = Callable[[str, dict[str, Any]], None]  # in words, and for the event log


class BalanceWatch(WrappedEngine):
    """``engine``; times the stages of a few steps, tells of them on rank 0, and then only passes on.

    Args:
        plan: what was predicted.
        tell: called on rank 0, once.
    """

    def __init__(self, engine: Engine, mesh: Mesh, plan: SplitPlan, tell: Tell) -> None:
        super().__init__(engine)
        self._mesh, self._plan, self._tell = mesh, plan, tell
        self._steps = 0
        self._stage_s: dict[int, float] = {}
        self._elapsed = 0.0

    def train_step(self, step: int, batch: StepBatch, loss_scale: Tensor | None = None) -> StepResult:
        self._steps += 1
        if not WARMUP < self._steps <= WARMUP + LOOKED_AT:
            return self._engine.train_step(step, batch, loss_scale)
        result = self._timed(step, batch, loss_scale)
        if self._steps == WARMUP + LOOKED_AT:
            self._conclude(len(batch.micro_batches))
        return result

    def _timed(self, step: int, batch: StepBatch, loss_scale: Tensor | None) -> StepResult:
        with timed_stages(self._mesh.device) as work:
            self._collect()
            begin = time.perf_counter()
            result = self._engine.train_step(step, batch, loss_scale)
            self._collect()
            self._elapsed += time.perf_counter() - begin
        for stage, seconds in work:
            self._stage_s[stage] = self._stage_s.get(stage, 0.0) + seconds()
        return result

    def _conclude(self, micro_batches: int) -> None:
        """Gathers and tells. Collective."""
        gathered: list[Any] = [None] * self._mesh.layout.world_size
        dist.all_gather_object(gathered, (self._stage_s, self._elapsed), group=self._mesh.control)
        if self._mesh.rank == 0:
            found = measured_balance(gathered, self._mesh.layout.stages, LOOKED_AT * micro_batches)
            self._tell(self._in_words(found), found | {"predicted": self._plan.as_json()["predicted"]})

    def _in_words(self, found: dict[str, Any]) -> str:
        stages = "|".join(f"{1e3 * seconds:.3g}" for seconds in found["stage_s"])
        promised = self._plan.predicted
        return (
            f"pipeline measured: {stages} ms per micro-batch and stage, slowest {found['imbalance']:.2f} x the mean "
            f"({promised.imbalance:.2f} predicted), bubble {found['bubble_share']:.1%} "
            f"({promised.bubble_share:.1%} predicted, without messages and the reduction of gradients)"
        )

    def _collect(self) -> None:
        if self._mesh.device.type == "cuda":
            torch.cuda.synchronize(self._mesh.device)


def measured_balance(of_ranks: list[tuple[dict[int, float], float]], stages: int, passes: int) -> dict[str, Any]:
    """From each rank's seconds by stage, and in all, to the mean over the replicas of each stage and the bubble."""
    stage_s = []
    for stage in range(stages):
        held = [seconds[stage] for seconds, _ in of_ranks if stage in seconds]
        stage_s.append(sum(held) / len(held) / passes)
    bubbles = [max(0.0, 1 - sum(seconds.values()) / elapsed) for seconds, elapsed in of_ranks]
    return {
        "stage_s": stage_s,
        "imbalance": max(stage_s) * stages / sum(stage_s),
        "bubble_share": sum(bubbles) / len(bubbles),
    }
