"""A batch: what passes from the data to the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

IGNORED = -100  # a target that does not count: padding


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    Attributes:
        inputs: ``[micro, seq]`` token ids (int64) or ``[micro, channels, height, width]`` pixels (float32).
        targets: ``[micro, seq]`` or ``[micro]`` int64; ``IGNORED`` where nothing is to be learnt.
        context: tensors with a leading micro dim that every stage and layer gets (positions, document ids).
    """

    inputs: Tensor
    targets: Tensor
    context: Mapping[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device) -> Batch:
        """A copy on ``device``; does not block where the memory is pinned."""
        move = {name: value.to(device, non_blocking=True) for name, value in self.context.items()}
        return Batch(self.inputs.to(device, non_blocking=True), self.targets.to(device, non_blocking=True), move)


@dataclass(frozen=True)
class StepBatch:
    """What one rank computes in one step.

    Attributes:
        micro_batches: equally many and equally shaped on every rank.
        target_count: targets that count in the *global* batch, over all ranks: the denominator of the mean of a
            built-in loss.
    """

    micro_batches: tuple[Batch, ...]
    target_count: int
