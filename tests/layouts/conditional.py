"""Defines modules whose forward pass does not use all parameters, as strangers write them.

All take rows of numbers; the first number of a row, or of the first row, decides which parts are used.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

INPUTS, CLASSES = 6, 5


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


class Experts(nn.Module):
    """A mixture of experts in a plain list. The rows choose their expert; the last expert is never chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, 8)
        self.experts = nn.ModuleList(block() for _ in range(6))
        self.last = nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        chosen = (inputs[:, 0].abs() * 2).long().clamp(max=len(self.experts) - 2)
        mixed = hidden.clone()
        for number, expert in enumerate(self.experts):
            rows = chosen == number
            if rows.any():
                mixed[rows] = expert(hidden[rows])
        return self.last(mixed)


class Tasks(nn.Module):
    """Layers that some steps leave out, and a head for each of two tasks that take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, 8)
        self.layers_ = nn.ModuleList(block() for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(8, CLASSES) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        step = int(inputs[0, -1])
        hidden = self.first(inputs)
        for number, layer in enumerate(self.layers_):
            if (step + number) % 3:
                hidden = hidden + layer(hidden)
        return self.heads[step % 2](hidden)


class Branch(nn.Module):
    """The same part is left out in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.never, self.last = nn.Linear(INPUTS, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.first(inputs).tanh())


class CountedExperts(Experts):
    """Has a loss that returns its own count."""

    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        losses = nn.functional.cross_entropy(outputs, targets, reduction="none", ignore_index=-100)
        return losses.sum(), (targets != -100).sum()


class Swapped(nn.Module):
    """Each rank uses another one of four blocks of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(INPUTS, 8), nn.Linear(8, CLASSES)
        self.blocks = nn.ModuleList(block() for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return self.last(self.blocks[2 * rank](self.first(inputs)))
