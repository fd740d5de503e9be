"""Your own experts in place of those of a GPT: their activation has bounds, as in gpt-oss (arXiv:2508.10925).

python -m hpc_train +strategy=zero1 model=moe_tiny model.kind=examples.own_experts_family:FAMILY strategy.ep=2
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hpc_train.config.schema import GPTConfig
from hpc_train.models.gpt import GPT
from hpc_train.models.moe import Experts, MixtureOfExperts, grouped_product

LIMIT = 7.0


class BoundedExperts(Experts):
    """Bounds the results of both projections before they are multiplied."""

    def compute(self, rows: Tensor, ends: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        """Returns the results for ``rows`` ``[rows, dim]``, of which expert ``e`` has those up to ``ends[e]``."""
        gate = grouped_product(rows, w1, ends).clamp(max=LIMIT)
        values = grouped_product(rows, w3, ends).clamp(-LIMIT, LIMIT)
        return grouped_product((values + 1) * gate * torch.sigmoid(1.702 * gate), w2, ends)


def build(config: GPTConfig) -> GPT:
    model = GPT(config)
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.experts = BoundedExperts(config, F.silu)
    return model
