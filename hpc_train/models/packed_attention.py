"""Computes attention inside packed documents without scores between documents.

On NVIDIA GPUs kernels take the boundaries of the documents instead of a mask, so that no tensor has an element for each
pair of tokens, and time grows with the sum of the squared lengths of the documents.

- ``torch.nn.attention.varlen.varlen_attn`` is used where it can be: half precision on compute capability 8.0 or higher,
  and heads of at most 256 elements in multiples of 8 (``mha_varlen_fwd`` in PyTorch's ``flash_api.cpp``). It takes
  grouped queries, is one operator in a compiled graph, and needs no compilation.
- Elsewhere, thus in fp32, the memory-efficient kernel computes with the same boundaries. Nested tensors use it in the
  same way. It keeps a number for each document, head and token of a sequence.

FlexAttention is the alternative in PyTorch: Triton compiles its kernels for each shape at the first step, its block
mask is computed anew for each batch, and heads of some widths do not fit into the shared memory of some GPUs
(pytorch/pytorch issues 133254 and 180278).

Neither kernel has fp64, and on AMD GPUs documents without tokens are not tested. There, as on CPUs, attention has a
mask of ``seq x seq`` elements per sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from hpc_train.data.document_ends import DOCUMENT_ENDS

BOUNDARIES = "document_boundaries"  # in the context of layers: ``[1 + documents]`` int32, over all sequences
OPERATORS = (torch.ops.torch_attn._varlen_attn.default, torch.ops.aten._efficient_attention_forward.default)
VARLEN, EFFICIENT, MASK = "varlen", "efficient", "mask"
_HALF = (torch.float16, torch.bfloat16)
# PyTorch 2.11 has no such argument: its operator takes grouped queries as they are
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def document_context(context: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns what the attention of all layers needs to stay inside the documents of ``context["document_ids"]``.

    That is ``BOUNDARIES`` if the device has kernels for them and the host has found the ends of the documents, else
    ``attention_mask``.
    """
    ids = context["document_ids"]
    if DOCUMENT_ENDS in context and has_kernels(ids.device):
        return {BOUNDARIES: _boundaries(context[DOCUMENT_ENDS], ids.shape[1])}
    return {"attention_mask": document_mask(ids)}


def has_kernels(device: torch.device) -> bool:
    """Returns whether ``device`` is an NVIDIA GPU."""
    return device.type == "cuda" and torch.version.hip is None


def _boundaries(ends: Tensor, length: int) -> Tensor:
    """Returns where each document begins, and the last one ends, if the sequences stand one after another.

    Args:
        ends: ``[micro, documents]``, where each document ends in its sequence.
        length: the number of tokens of a sequence.
    """
    firsts = torch.arange(0, len(ends) * length, length, dtype=ends.dtype, device=ends.device)
    return F.pad((ends + firsts.unsqueeze(1)).flatten(), (1, 0))


def document_mask(document_ids: Tensor) -> Tensor:
    """Returns a mask ``[micro, 1, seq, seq]``: true for keys in the same document that are not later than the query."""
    length = document_ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril()
    return ((document_ids.unsqueeze(2) == document_ids.unsqueeze(1)) & causal).unsqueeze(1)


@torch.compiler.assume_constant_result
def kernel_for(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Returns ``VARLEN``, ``EFFICIENT`` or ``MASK``.

    Args:
        device: one for which ``has_kernels`` is true.
        dtype: the dtype of the queries, keys and values.
    """
    if dtype not in (*_HALF, torch.float32) or head_dim % 8:
        return MASK
    recent = torch.cuda.get_device_capability(device) >= (8, 0)
    if dtype in _HALF and recent and head_dim <= 256:
        return VARLEN
    return EFFICIENT if recent or dtype is not torch.bfloat16 else MASK


def attend_inside_documents(kernel: str, query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor) -> Tensor:
    """Returns causal attention inside each document, in the shape of ``query``.

    Args:
        kernel: ``VARLEN`` or ``EFFICIENT``.
        query: ``[micro, seq, heads, head_dim]``.
        key, value: ``[micro, seq, kv_heads, head_dim]``.
        boundaries: ``BOUNDARIES`` of the context. They must cover all tokens: gradients of others are undefined.
    """
    attend = _varlen if kernel == VARLEN else _efficient
    mixed = attend(query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), boundaries, query.shape[1])
    return mixed.unflatten(0, query.shape[:2])


def _varlen(query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, longest: int) -> Tensor:
    """Calls ``varlen_attn`` with flash attention on all versions.

    PyTorch 2.15 prefers cuDNN on some GPUs, which before 9.25 returns NaN if a document has no tokens
    (NVIDIA/cudnn-frontend issue 943).
    """
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        mixed = varlen_attn(
            query, key, value, boundaries, boundaries, longest, longest, window_size=(-1, 0), **_GROUPED
        )
    assert isinstance(mixed, Tensor)
    return mixed


def _efficient(query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, longest: int) -> Tensor:
    """Calls the memory-efficient kernel, which needs the keys and values of every query."""
    times = query.shape[1] // key.shape[1]
    heads = (query, key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1))
    query, key, value = (each.unsqueeze(0) for each in heads)
    causal, with_logsumexp, dropout = 1, True, 0.0
    mixed: Tensor = torch.ops.aten._efficient_attention_forward(
        query, key, value, None, boundaries, boundaries, longest, longest, dropout, causal, with_logsumexp
    )[0]
    return mixed.squeeze(0)


def description(kernel: str) -> str:
    """Returns what is told of ``VARLEN`` or ``EFFICIENT`` in the log."""
    if kernel == VARLEN:
        return "varlen_attn (flash attention) inside each document, without a mask"
    return (
        "the memory-efficient kernel inside each document, without a mask, because varlen_attn needs bf16 or fp16, "
        "heads of at most 256 elements and compute capability 8.0"
    )


def without_kernel(context: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Returns why packed documents need a mask; an empty string if they need none."""
    if not has_kernels(device):
        return "only NVIDIA GPUs have kernels that take the boundaries of documents"
    if DOCUMENT_ENDS not in context:
        return "the tokens of a document do not stand together"
    if kernel_for(device, dtype, head_dim) == MASK:
        return f"no kernel that takes the boundaries of documents has {dtype} and heads of {head_dim} elements here"
    return ""
