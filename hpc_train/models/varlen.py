"""Calls PyTorch's flash attention for sequences of different lengths, with the arguments of each PyTorch version."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

# PyTorch 2.11 has no such argument: its operator takes grouped queries as they are
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def attend(
    query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, longest: int, scale: float | None, before: int
) -> Tensor:
    """Returns causal attention inside each document with flash attention, ``[tokens, heads, head_dim]``.

    PyTorch 2.15 prefers cuDNN on some GPUs, which before 9.25 returns NaN if a document has no tokens
    (NVIDIA/cudnn-frontend issue 943).

    Args:
        query: ``[tokens, heads, head_dim]``.
        key, value: ``[tokens, kv_heads, head_dim]``.
        boundaries: ``[1 + documents]`` int32: the positions at which the documents begin, and the end of the last one.
        longest: the number of tokens of the longest document, or more.
        before: the number of previous tokens to which a token attends; -1 means all.
    """
    options: dict[str, Any] = {"scale": scale, "window_size": (before, 0), **_GROUPED}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        mixed = varlen_attn(query, key, value, boundaries, boundaries, longest, longest, **options)
    assert isinstance(mixed, Tensor)
    return mixed
