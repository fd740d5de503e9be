"""Evaluates the model on a validation set: exact means over all samples, however they are divided among ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hpc_train.data.dataset import StepBatch
from hpc_train.data.feed import LocalBatch
from hpc_train.parallel.engine import Engine, StepNumbers, StepResult
from hpc_train.run.requests import StopFlag
from hpc_train.train.step import Control


def evaluate(
    engine: Engine, feed: Iterable[LocalBatch], control: Control | None = None, stop: StopFlag | None = None
) -> StepNumbers | None:
    """Computes the exact mean loss (and accuracy) over all targets of ``feed`` on all ranks. Collective.

    It sums over batches and ranks in fp64 and divides once, so padding and short batches do not distort the mean.

    Args:
        control: lets the ranks agree on a stop request after each batch; None ignores stop requests.
        stop: the stop flag of this rank.

    Returns:
        The means, or None if a stop request interrupted the evaluation.
    """
    total: StepResult | None = None
    for batch in feed:
        if control is not None:
            control.post(stop is not None and stop.requested, 0)
        result = engine.eval_step(StepBatch(batch.micro_batches, max(1, batch.local_count)))
        result = StepResult(_wide(result.loss_sum), _wide(result.target_count), result.correct)
        total = result if total is None else _add(total, result)
        if control is not None and control.read().stop:
            return None
    if total is None:
        raise ValueError("the validation set has no batches")
    return engine.reduce(total)


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.float64)


def _add(one: StepResult, other: StepResult) -> StepResult:
    both = one.correct is not None and other.correct is not None
    correct = one.correct + other.correct if both else None  # type: ignore[operator]
    return StepResult(one.loss_sum + other.loss_sum, one.target_count + other.target_count, correct)
