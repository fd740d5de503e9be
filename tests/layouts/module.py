"""Modules of a user, without stem, layers and head."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Tiny(nn.Module):
    """Images ``[micro, 3, 8, 8]`` to class scores.

    Args:
        batch_norm: normalise by the statistics of the batch.
        unused: bring a parameter that no forward uses.
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
