"""Kernels of packed attention in plain torch, with the signatures of the real ones, for machines without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from hpc_train.models import packed_attention, varlen


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """``torch.nn.attention.varlen.varlen_attn`` of torch 2.13."""
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert window_size[1] == 0 and (max_q, cu_seq_q) == (max_k, cu_seq_k)
    return _each_document(query, key, value, cu_seq_q, max_q, scale, window_size[0])


def varlen_attn_2_11(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """That of torch 2.11, whose operator takes grouped queries without being told."""
    options: dict[str, Any] = {"scale": scale, "window_size": window_size, "enable_gqa": True}
    return varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options)


def efficient_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    custom_mask_type: int,
    compute_log_sumexp: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """``aten::_efficient_attention_forward``, which has one sequence of all tokens and no grouped queries."""
    assert bias is None and dropout_p == 0 and custom_mask_type == 1 and compute_log_sumexp
    assert query.shape == key.shape and len(query) == 1
    assert (max_seqlen_q, cu_seqlens_q) == (max_seqlen_k, cu_seqlens_k)
    return (_each_document(query[0], key[0], value[0], cu_seqlens_q, max_seqlen_q, scale, -1).unsqueeze(0),)


def _each_document(
    query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, longest: int, scale: float | None, before: int
) -> Tensor:
    """Returns causal attention inside each document, in the order of the tokens.

    Args:
        before: how many tokens before itself a token attends to; -1 is all.
    """
    places, lengths = boundaries.tolist(), boundaries.diff()
    assert boundaries.dtype == torch.int32 and boundaries.is_contiguous()
    assert query.dtype == key.dtype == value.dtype
    assert places[0] == 0 and places[-1] == len(query)
    assert lengths.min() >= 0 and lengths.max() <= longest
    times = query.shape[1] // key.shape[1]
    key, value = (heads.repeat_interleave(times, dim=1) for heads in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    cut = [(query[begin:end], key[begin:end], value[begin:end]) for begin, end in pairwise(places)]
    return torch.cat([_attention(*each, scale, before) for each in cut])


def _attention(query: Tensor, key: Tensor, value: Tensor, scale: float, before: int) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    distance = torch.arange(len(query)).unsqueeze(1) - torch.arange(len(key))
    hidden = (distance < 0) | ((distance > before) if before >= 0 else False)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(dim=-1), value)


@contextmanager
def kernels_in_plain_torch(kernel: str, told: bool = True) -> Iterator[list[str]]:
    """Uses the kernels of this module on the CPU; yields a list in which each choice of ``kernel`` is recorded.

    Args:
        told: whether ``varlen_attn`` has the argument ``enable_gqa``.
    """
    chosen: list[str] = []

    def choose(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
        chosen.append(kernel)
        return kernel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_attention, "has_kernels", lambda device: True)
        patch.setattr(packed_attention, "kernel_for", choose)
        patch.setattr(varlen, "varlen_attn", varlen_attn if told else varlen_attn_2_11)
        patch.setattr(varlen, "_GROUPED", {"enable_gqa": True} if told else {})
        patch.setattr(torch.ops.aten, "_efficient_attention_forward", efficient_attention_forward)
        yield chosen
