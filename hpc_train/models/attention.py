"""Multi-head attention with grouped queries (Ainslie et al. 2023, arXiv:2305.13245), causal or not.

The number of heads is read from the projected tensors: under tensor parallelism a rank's projections give its own heads
and the same code runs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from hpc_train.models.rotary import rotate


class Attention(nn.Module):
    """Queries from ``wq``, keys and values of ``n_kv_heads`` heads from ``wk`` and ``wv``, output through ``wo``."""

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, *, causal: bool, bias: bool) -> None:
        super().__init__()
        self.head_dim = dim // n_heads
        self.causal = causal
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=bias)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=bias)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=bias)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=bias)

    def forward(self, hidden: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        """``hidden`` ``[micro, seq, dim]`` to the same shape.

        ``context`` may hold ``rotary_cosine`` and ``rotary_sine`` (see ``rotary.rotate``) and ``attention_mask``, bool
        and broadcastable to ``[micro, heads, seq, seq]``, which then replaces the causal mask.
        """
        query, key, value = (
            projection(hidden).unflatten(-1, (-1, self.head_dim)) for projection in (self.wq, self.wk, self.wv)
        )
        if "rotary_cosine" in context:
            query = rotate(query, context["rotary_cosine"], context["rotary_sine"])
            key = rotate(key, context["rotary_cosine"], context["rotary_sine"])
        mask = context.get("attention_mask")
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            is_causal=self.causal and mask is None,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return self.wo(mixed.transpose(1, 2).flatten(2))
