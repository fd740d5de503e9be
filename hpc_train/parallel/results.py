"""From the sums on each rank to the numbers of a step: the one place where the host waits for the device."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hpc_train.parallel.engine import StepNumbers, StepResult
from hpc_train.parallel.mesh import Mesh


def reduce_result(result: StepResult, mesh: Mesh) -> StepNumbers:
    """Adds up ``result`` over all ranks on the training backend. Collective.

    Ranks without the head hold zeros; tensor-parallel ranks computed the same sums, and only the first one's count.
    """
    counts = mesh.tp_rank == 0
    correct = result.correct
    values = [result.loss_sum, result.target_count]
    values += [torch.zeros_like(result.loss_sum)] * 2 if correct is None else [correct, torch.ones_like(correct)]
    sums = torch.stack([value.to(mesh.device, torch.float64) for value in values]) * counts
    if mesh.layout.world_size > 1:
        dist.all_reduce(sums)
    loss_sum, target_count, correct_sum, reports = sums.tolist()
    targets = target_count or 1.0
    return StepNumbers(loss_sum / targets, target_count, correct_sum / targets if reports else None)
