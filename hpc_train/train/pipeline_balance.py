"""Compares the predicted pipeline balance of ``pp_split=flops|measured`` with the first steps of an attempt."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.data.dataset import StepBatch
from hpc_train.measure.time_breakdown import timed_stages
from hpc_train.parallel.balance import SplitPlan
from hpc_train.parallel.engine import Engine, StepResult, WrappedEngine
from hpc_train.parallel.mesh import Mesh

WARMUP_STEPS = 2
TIMED_STEPS = 3

ReportBalance = Callable[[str, dict[str, Any]], None]  # (message, details for the event log)


class BalanceWatch(WrappedEngine):
    """Wraps ``engine``, times the stages for a few steps, and reports the balance on rank 0.

    Args:
        plan: the predicted balance.
        report: called once, on rank 0.
    """

    def __init__(self, engine: Engine, mesh: Mesh, plan: SplitPlan, report: ReportBalance) -> None:
        super().__init__(engine)
        self._mesh = mesh
        self._plan = plan
        self._report = report
        self._steps = 0
        self._stage_s: dict[int, float] = {}
        self._elapsed = 0.0

    def train_step(self, step: int, batch: StepBatch, loss_scale: Tensor | None = None) -> StepResult:
        self._steps += 1
        if not WARMUP_STEPS < self._steps <= WARMUP_STEPS + TIMED_STEPS:
            return self._engine.train_step(step, batch, loss_scale)
        result = self._timed_step(step, batch, loss_scale)
        if self._steps == WARMUP_STEPS + TIMED_STEPS:
            self._gather_and_report(len(batch.micro_batches))
        return result

    def _timed_step(self, step: int, batch: StepBatch, loss_scale: Tensor | None) -> StepResult:
        with timed_stages(self._mesh.device) as work:
            self._synchronize()
            begin = time.perf_counter()
            result = self._engine.train_step(step, batch, loss_scale)
            self._synchronize()
            self._elapsed += time.perf_counter() - begin
        for stage, seconds in work:
            self._stage_s[stage] = self._stage_s.get(stage, 0.0) + seconds()
        return result

    def _gather_and_report(self, micro_batches: int) -> None:
        """Gathers the times of all ranks and reports them on rank 0. Collective."""
        gathered: list[Any] = [None] * self._mesh.layout.world_size
        dist.all_gather_object(gathered, (self._stage_s, self._elapsed), group=self._mesh.control)
        if self._mesh.rank == 0:
            found = measured_balance(gathered, self._mesh.layout.stages, TIMED_STEPS * micro_batches)
            self._report(self._message(found), found | {"predicted": self._plan.as_json()["predicted"]})

    def _message(self, found: dict[str, Any]) -> str:
        stages = "|".join(f"{1e3 * seconds:.3g}" for seconds in found["stage_s"])
        predicted = self._plan.predicted
        return (
            f"pipeline measured: {stages} ms per micro-batch and stage; the slowest stage takes "
            f"{found['imbalance']:.2f} x the mean ({predicted.imbalance:.2f} predicted), bubble "
            f"{found['bubble_share']:.1%} ({predicted.bubble_share:.1%} predicted without communication)"
        )

    def _synchronize(self) -> None:
        if self._mesh.device.type == "cuda":
            torch.cuda.synchronize(self._mesh.device)


def measured_balance(of_ranks: list[tuple[dict[int, float], float]], stages: int, passes: int) -> dict[str, Any]:
    """Returns the mean seconds of each stage per pass, their imbalance, and the bubble share.

    Args:
        of_ranks: for each rank, stage -> seconds, and the elapsed seconds.
        passes: number of micro-batches in that time.
    """
    stage_s = []
    for stage in range(stages):
        times = [seconds[stage] for seconds, _ in of_ranks if stage in seconds]
        stage_s.append(sum(times) / len(times) / passes)
    bubbles = [max(0.0, 1 - sum(seconds.values()) / elapsed) for seconds, elapsed in of_ranks]
    return {
        "stage_s": stage_s,
        "imbalance": max(stage_s) * stages / sum(stage_s),
        "bubble_share": sum(bubbles) / len(bubbles),
    }
