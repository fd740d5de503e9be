"""Defines modules in the forms of public code, which do not always use all parameters. All take rows of numbers."""

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


class Nested(nn.Module):
    """Blocks in lists of lists and of dicts, as in vit-pytorch and x-transformers, and a scalar as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(INPUTS, 8), nn.Linear(8, CLASSES)
        parts = [{"norm": nn.LayerNorm(8), "forward": block()} for _ in range(2)]
        self.lists = nn.ModuleList(nn.ModuleList(part.values()) for part in parts)
        self.dicts = nn.ModuleList(nn.ModuleDict({"attention": block(), "drop": nn.Dropout(0.0)}) for _ in range(3))
        self.logit_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for norm, part in self.lists:  # type: ignore[misc]
            hidden = hidden + part(norm(hidden))
        for each in self.dicts:
            hidden = hidden + each["drop"](each["attention"](hidden))  # type: ignore[index]
        return self.logit_scale.exp() * self.last(hidden)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Embedding(4, 8, sparse=True), nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.first((inputs[:, 0] > 0).long()))


class SparseCall(nn.Module):
    """Nothing but the gradient shows that it is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Parameter(torch.ones(4, 8)), nn.Linear(8, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(nn.functional.embedding((inputs[:, 0] > 0).long(), self.table, sparse=True))


class Unfreezing(nn.Module):
    """Begins to train its last layer in the first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(INPUTS, 8), nn.Linear(8, CLASSES).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        self.last.requires_grad_(True)
        return self.last(self.first(inputs))
