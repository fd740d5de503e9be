"""Computes attention inside packed documents and sliding windows without scores between documents or beyond a window.

On NVIDIA GPUs kernels take the boundaries of the documents instead of a mask, so that no tensor has an element for each
pair of tokens, and time grows with the sum of the squared lengths of the documents.

- ``torch.nn.attention.varlen.varlen_attn`` is used if possible: for half precision on compute capability 8.0 or higher,
  and heads of at most 256 elements in multiples of 8 (``mha_varlen_fwd`` in PyTorch's ``flash_api.cpp``). It supports
  grouped queries, is a single operator in a compiled graph, and needs no compilation.
- Otherwise, for example in fp32, the memory-efficient kernel computes with the same boundaries. Nested tensors use it
  in the same way. It keeps a number for each document, head and token of a sequence.

FlexAttention is the alternative in PyTorch: Triton compiles its kernels for each shape at the first step, its block
mask is computed anew for each batch, and heads of some widths do not fit into the shared memory of some GPUs
(pytorch/pytorch issues 133254 and 180278).

Neither kernel supports fp64, and on AMD GPUs documents without tokens are not tested. In these cases, as on CPUs,
attention has a mask of ``seq x seq`` elements per sequence.

A sliding window also needs ``varlen_attn``; without packed documents, each sequence is then a document. The
memory-efficient operator accepts a window, but PyTorch 2.13 does not pass it on to the backward pass, so in fp32 a
window needs a mask, as on CPUs. No kernel supports a soft cap: plain operations compute such scores, with a mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hpc_train.data.device_copy import DOCUMENT_ENDS

BOUNDARIES = "document_boundaries"  # in the context of layers: ``[1 + documents]`` int32, over all sequences
RING_OPERATOR = "hpc_train::ring_attention"
OPERATORS = ("torch_attn::_varlen_attn", "aten::_efficient_attention_forward", RING_OPERATOR)
VARLEN, EFFICIENT, MASK = "varlen", "efficient", "mask"
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Scores:
    """Describes how attention computes its scores.

    Attributes:
        scale: the factor of the products of queries and keys; None is ``head_dim ** -0.5``.
        window: the number of tokens to which a token attends, itself included; None is all.
        cap: scores ``x`` become ``cap * tanh(x / cap)``; None leaves them.
    """

    scale: float | None = None
    window: int | None = None
    cap: float | None = None


def is_narrow(scores: Scores, length: int) -> bool:
    """Returns whether there is a window that is shorter than ``length`` tokens."""
    return scores.window is not None and scores.window < length


def document_context(context: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors that limit the attention of all layers to the documents of ``context["document_ids"]``.

    The result contains ``BOUNDARIES`` if the device has kernels for them and the host has found the ends of the
    documents, else ``attention_mask``.
    """
    ids = context["document_ids"]
    if DOCUMENT_ENDS in context and has_kernels(ids.device):
        ends = context[DOCUMENT_ENDS]
        length = ids.shape[1]
        firsts = torch.arange(0, len(ends) * length, length, dtype=ends.dtype, device=ends.device)
        return {BOUNDARIES: F.pad((ends + firsts.unsqueeze(1)).flatten(), (1, 0))}
    return {"attention_mask": attention_mask(ids, ids.shape[1], None, ids.device)}


def has_kernels(device: torch.device) -> bool:
    """Returns whether ``device`` is an NVIDIA GPU."""
    return device.type == "cuda" and torch.version.hip is None


def local_context(
    context: Mapping[str, Tensor], inputs: tuple[int, int], device: torch.device, scores: Scores
) -> dict[str, Tensor]:
    """Returns the tensors that replace ``BOUNDARIES`` and ``attention_mask`` in layers with the window of ``scores``.

    ``context`` holds the result of ``document_context`` and ``document_ids``; ``inputs`` holds the number of sequences
    and the number of tokens of each.
    """
    sequences, length = inputs
    if not is_narrow(scores, length) or (BOUNDARIES in context and scores.cap is None):
        return {}  # the kernel takes the window and the boundaries of the documents
    if "document_ids" not in context and scores.cap is None and has_kernels(device):
        return {BOUNDARIES: torch.arange(0, (sequences + 1) * length, length, dtype=torch.int32, device=device)}
    return {"attention_mask": attention_mask(context.get("document_ids"), length, scores.window, device)}


def attention_mask(document_ids: Tensor | None, length: int, window: int | None, device: torch.device) -> Tensor:
    """Returns a mask ``[micro or 1, 1, seq, seq]``: true for keys that are not later than the query.

    The keys are also in the window that ends at the query, and in its document if there are ``document_ids`` ``[micro,
    seq]``.
    """
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril()
    if window is not None:
        mask = mask.triu(1 - window)
    if document_ids is not None:
        mask = mask & (document_ids.unsqueeze(2) == document_ids.unsqueeze(1)).unsqueeze(1)
    return mask


def kernel_for(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Returns ``VARLEN``, ``EFFICIENT`` or ``MASK`` for queries, keys and values of ``dtype`` on a ``device`` for which
    ``has_kernels`` is true."""
    if dtype not in (*_HALF, torch.float32) or head_dim % 8:
        return MASK
    recent = torch.cuda.get_device_capability(device) >= (8, 0)
    if dtype in _HALF and recent and head_dim <= 256:
        return VARLEN
    if recent or dtype is not torch.bfloat16:
        return EFFICIENT
    return MASK


def kernel_of_scores(device: torch.device, dtype: torch.dtype, head_dim: int, scores: Scores) -> str:
    """Returns the result of ``kernel_for``, or ``MASK`` if that kernel does not support the window or the soft cap."""
    kernel = MASK if scores.cap is not None else kernel_for(device, dtype, head_dim)
    if kernel == EFFICIENT and scores.window is not None:
        return MASK
    return kernel


def attend_inside_documents(
    kernel: str, query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, scores: Scores
) -> Tensor:
    """Returns causal attention inside each document, in the shape of ``query``.

    Args:
        kernel: ``VARLEN`` or ``EFFICIENT``.
        query: ``[micro, seq, heads, head_dim]``.
        key, value: ``[micro, seq, kv_heads, head_dim]``.
        boundaries: ``BOUNDARIES`` of the context. They must cover all tokens: gradients of others are undefined.
        scores: without a soft cap, and with a window only for ``VARLEN``.
    """
    attend = _varlen if kernel == VARLEN else _efficient
    mixed = attend(query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), boundaries, query.shape[1], scores)
    return mixed.unflatten(0, query.shape[:2])


def _varlen(query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, longest: int, scores: Scores) -> Tensor:
    from hpc_train.models.varlen import attend  # imports torch._dynamo, which takes 0.3 s

    before = -1 if scores.window is None else scores.window - 1  # tokens before the query
    return attend(query, key, value, boundaries, longest, scores.scale, before)


def _efficient(query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, longest: int, scores: Scores) -> Tensor:
    """Calls the memory-efficient kernel, which needs the keys and values of every query."""
    times = query.shape[1] // key.shape[1]
    heads = (query, key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1))
    query, key, value = (tensor.unsqueeze(0) for tensor in heads)
    causal = 1
    with_logsumexp = True
    dropout = 0.0
    tensors = (query, key, value, None, boundaries, boundaries)
    mixed: Tensor = torch.ops.aten._efficient_attention_forward(
        *tensors, longest, longest, dropout, causal, with_logsumexp, scale=scores.scale
    )[0]
    return mixed.squeeze(0)


def flash_kernel() -> str:
    """Returns which flash attention this process calls: that of PyTorch, or the one that is activated in its place."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)  # PyTorch 2.11 lacks it
    return (current and current()) or "flash attention"


def description(kernel: str, scores: Scores) -> str:
    """Describes ``VARLEN`` or ``EFFICIENT`` for the log."""
    if kernel == VARLEN:
        window = "" if scores.window is None else f" and a window of {scores.window} tokens"
        return f"varlen_attn ({flash_kernel()}) inside each document{window}, without a mask"
    return (
        "the memory-efficient kernel inside each document, without a mask, because varlen_attn needs bf16 or fp16, "
        "heads of at most 256 elements and compute capability 8.0"
    )


def without_kernel(
    context: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype, head_dim: int, scores: Scores
) -> str:
    """Returns the reason why packed documents or a window need a mask; an empty string if they need none."""
    if not has_kernels(device):
        taken = "the boundaries of documents" if scores.window is None else "windows"
        return f"only NVIDIA GPUs have kernels that take {taken}"
    if "document_ids" in context and DOCUMENT_ENDS not in context:
        return "the tokens of a document are not contiguous"
    kernel = kernel_for(device, dtype, head_dim)
    if kernel == MASK:
        return f"no kernel for boundaries of documents supports {dtype} and heads of {head_dim} elements here"
    if kernel != kernel_of_scores(device, dtype, head_dim, scores):
        return f"the kernel for {dtype} does not support a window in its backward pass"
    return ""
