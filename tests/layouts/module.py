"""Defines models as a user does: modules without stem, layers and head, and losses that return their own counts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpc_train.config.schema import GPTConfig
from hpc_train.data.dataset import IGNORED
from hpc_train.models.gpt import GPT, GPTHead
from hpc_train.models.transformer import cross_entropy


class Tiny(nn.Module):
    """Maps images ``[micro, 3, 8, 8]`` to class scores.

    Args:
        batch_norm: normalises by the statistics of the batch.
        unused: adds a parameter that no forward uses.
    """

    def __init__(self, classes: int, batch_norm: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3)
        self.norm = nn.BatchNorm2d(6) if batch_norm else nn.GroupNorm(2, 6)
        self.last = nn.Linear(6, classes)
        if unused:
            self.unused = nn.Parameter(torch.ones(4))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.norm(self.first(inputs)).relu().mean((2, 3)))


def weighted_cross_entropy(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a weighted sum and the sum of the weights. Weights of 2.5, 5 and 7.5 give the shares different sums."""
    weights = torch.where(targets == IGNORED, 0.0, 2.5 * (1 + targets % 3)).flatten()
    losses = F.cross_entropy(scores.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return (losses * weights).sum(), weights.sum()


class WeightedTiny(Tiny):
    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return weighted_cross_entropy(outputs, targets)


class ScaledTiny(Tiny):
    """Multiplies the sum and the count of the cross entropy by ``scale``, and by N in the Nth forward if it ``grows``.

    The mean and the gradients are those of ``Tiny``.
    """

    def __init__(self, classes: int, scale: int = 1, grows: bool = False) -> None:
        super().__init__(classes)
        self._scale, self._grows, self._forwards = scale, grows, 0

    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        self._forwards += 1
        scale = self._scale * (self._forwards if self._grows else 1)
        total, count = cross_entropy(outputs, targets)
        return total * scale, count * scale


class WeightedHead(GPTHead):
    def loss(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return weighted_cross_entropy(self(hidden), targets)


class WeightedGPT(GPT):
    """Has the three parts of a GPT and a head whose loss differs from the built-in one."""

    def __init__(self, **sizes: Any) -> None:
        config = GPTConfig(**sizes)
        super().__init__(config)
        output = self.head.output if self.head is not None else None
        self.head = WeightedHead(config)
        if output is not None and config.tied_embeddings:
            self.head.output = output
