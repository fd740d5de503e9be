"""Keeps a moving average of the weights: average <- decay x average + (1 - decay) x weights after each step.

The average is elementwise, so each rank keeps the average of its shards, in the dtype of the parameters. A checkpoint
contains it under the names of the parameters, and any layout loads it. Buffers and frozen parameters are not averaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpc_train.train.hooks import Hook, HookContext


class EMA(Hook):
    """Averages the weights from the first step of the run, or from the step at which the hook was added.

    Args:
        decay: in [0, 1).
        evaluate: whether evaluations use the average. During an evaluation it replaces the weights.
    """

    def __init__(self, decay: float = 0.999, evaluate: bool = True) -> None:
        self._decay = decay
        self._evaluate = evaluate
        self._average: dict[str, Tensor] = {}

    def start(self, context: HookContext) -> None:
        trained = {name: value for name, value in context.parameters.items() if value.requires_grad}
        self._average = {name: value.detach().clone() for name, value in trained.items()}

    @torch.no_grad()
    def step(self, context: HookContext) -> None:
        averages, weights = self._pairs(context)
        if averages:
            torch._foreach_lerp_(averages, weights, 1 - self._decay)

    @contextmanager
    def evaluating(self, context: HookContext) -> Iterator[None]:
        if not self._evaluate:
            yield
            return
        self._swap(context)
        try:
            yield
        finally:
            self._swap(context)

    def state_dict(self) -> Mapping[str, Any]:
        return self._average

    @torch.no_grad()
    def _swap(self, context: HookContext) -> None:
        for average, weight in zip(*self._pairs(context), strict=True):
            before = weight.clone()
            weight.copy_(average)
            average.copy_(before)

    def _pairs(self, context: HookContext) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the local shards of the averages and of the weights, in the same order."""
        weights = context.parameters
        return [_local(value) for value in self._average.values()], [_local(weights[name]) for name in self._average]


def _local(tensor: Tensor) -> Tensor:
    plain = tensor.detach()
    return plain.to_local() if isinstance(plain, DTensor) else plain
