"""Implements the layer, the attention, the head and the losses that the transformers share.

A loss returns a sum and the number of targets, so that the mean is computed once over the global batch. The attention
has grouped queries (Ainslie et al. 2023, arXiv:2305.13245); it reads the number of heads from the projected tensors, so
the same code runs on the heads of a tensor-parallel rank. Rotary embeddings (Su et al. 2021, arXiv:2104.09864) pair
coordinate ``i`` of a head with ``i + head_dim / 2``, like Llama on Hugging Face.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.utils.checkpoint import checkpoint

from hpc_train.data.dataset import IGNORED, Batch
from hpc_train.models import packed_attention as packed
from hpc_train.models.model import Head, Model


class RMSNorm(nn.RMSNorm):
    """Normalises hidden states by their root mean square, under autocast as ``_normalised`` describes."""

    def forward(self, hidden: Tensor) -> Tensor:
        return _normalised(self, F.rms_norm, hidden, (self.weight,))


class LayerNorm(nn.LayerNorm):
    """Normalises hidden states by mean and variance, under autocast as ``_normalised`` describes."""

    def forward(self, hidden: Tensor) -> Tensor:
        return _normalised(self, F.layer_norm, hidden, (self.weight, self.bias))


def _normalised(
    norm: nn.RMSNorm | nn.LayerNorm, function: Callable[..., Tensor], hidden: Tensor, parameters: Iterable[Tensor]
) -> Tensor:
    """Returns ``function(hidden, shape, *parameters, eps)``; under autocast its result has the compute dtype.

    The parameters are then rounded to the compute dtype, which ZeRO has already done, so that all strategies compute
    the same. Autocast itself would convert to fp32 on GPUs, and every projection would convert the result back. The
    kernels compute in fp32 internally.
    """
    dtype = _autocast_dtype(hidden.device)
    if dtype is None:
        return function(hidden, norm.normalized_shape, *parameters, norm.eps)
    rounded = (parameter.to(dtype).to(hidden.dtype) for parameter in parameters)
    with torch.autocast(hidden.device.type, enabled=False):
        return function(hidden, norm.normalized_shape, *rounded, norm.eps).to(dtype)


def in_compute_dtype(values: Tensor) -> Tensor:
    """Returns ``values`` in the dtype of matrix products under autocast, and unchanged without it."""
    dtype = _autocast_dtype(values.device)
    return values if dtype is None else values.to(dtype)


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


class PreNormLayer(nn.Module):
    """Adds an attention branch and a feed-forward branch, each with a norm, to hidden states ``[micro, tokens, dim]``.

    Args:
        norm: returns a new norm for one branch.
    """

    def __init__(self, norm: Callable[[], nn.Module], attention: nn.Module, ffn: nn.Module, dropout: float) -> None:
        super().__init__()
        self.attention_norm = norm()
        self.attention = attention
        self.ffn_norm = norm()
        self.ffn = ffn
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden), context))
        return hidden + self.dropout(self.ffn(self.ffn_norm(hidden)))


class CrossEntropyHead(Head):
    """Computes the cross-entropy of the logits ``[..., classes]`` that its forward pass returns.

    Attributes:
        chunks: the number of chunks of the sequence, for heads with logits at every position. Only the logits of one
            chunk exist at a time, and the backward pass computes them again.
        sequence_shards: the number of shards of the sequence in the hidden states; the logits cover all of it.
    """

    chunks: int = 1
    sequence_shards: int = 1

    @property
    def own_count(self) -> bool:
        return self._has_own_loss

    @property
    def _has_own_loss(self) -> bool:
        """Returns whether a subclass overrides the loss."""
        return type(self).loss is not CrossEntropyHead.loss or type(self)._loss is not CrossEntropyHead._loss

    def loss(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if self.chunks == 1:
            return self._loss(hidden, targets)
        # the RNG state is not saved, since nothing in a head is random
        sums = [
            checkpoint(self._loss, *chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in self._cut(hidden, targets)
        ]
        loss, count = (torch.stack(column).sum() for column in zip(*sums, strict=True))
        return loss, count

    def correct(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return torch.stack([count_correct(self(part), wanted) for part, wanted in self._cut(hidden, targets)]).sum()

    def evaluate(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        if self._has_own_loss:
            if self.observe is not None:
                for part, wanted in self._cut(hidden, targets):
                    self.observe(self(part), wanted)
            # ``correct`` counts targets, and such a loss may count something else
            overrides = type(self).correct is not CrossEntropyHead.correct
            return (*self.loss(hidden, targets), self.correct(hidden, targets) if overrides else None)
        sums = [self._evaluate(*chunk) for chunk in self._cut(hidden, targets)]
        loss, count, correct = (torch.stack(column).sum() for column in zip(*sums, strict=True))
        return loss, count, correct

    def _loss(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return cross_entropy(self(hidden), targets)

    def _evaluate(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self(hidden)
        if self.observe is not None:
            self.observe(logits, targets)
        return (*cross_entropy(logits, targets), count_correct(logits, targets))

    def _cut(self, hidden: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Splits both along the sequence (dim 1).

        Each rank splits its own shard. The logits of a chunk are gathered from the same piece of every shard, so its
        targets are taken from the same pieces.
        """
        if self.chunks == 1:
            return [(hidden, targets)]
        sharded = targets.unflatten(1, (self.sequence_shards, -1)).chunk(self.chunks, 2)
        pieces = zip(hidden.chunk(self.chunks, 1), sharded, strict=True)
        return [(part, wanted.flatten(1, 2)) for part, wanted in pieces]


def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum of the negative log-likelihoods in nats, and the number of targets that are not ``IGNORED``.

    Args:
        logits: ``[..., classes]``; half precision is converted to float32 first.
        targets: ``[...]`` int64.
    """
    flat = _widened(logits).flatten(0, -2)
    loss = F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, (targets != IGNORED).sum()


def squared_error(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum of squared differences over the elements whose target is not ``IGNORED``, and their number.

    Args:
        outputs: a tensor of the shape of ``targets``.
        targets: a tensor of any dtype; it is converted to the dtype of ``outputs``, at least float32.
    """
    wide = _widened(outputs)
    counts = targets != IGNORED
    difference = torch.where(counts, wide - targets.to(wide.dtype), 0.0)
    return difference.square().sum(), counts.sum()


def count_correct(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the number of targets (int64) with the largest of their ``logits``; ignored targets do not count."""
    return (logits.argmax(dim=-1) == targets).sum()


def _widened(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


class Attention(nn.Module):
    """Computes attention; ``wk`` and ``wv`` project to ``n_kv_heads`` heads, which the ``n_heads`` queries share."""

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, *, causal: bool, bias: bool) -> None:
        super().__init__()
        self.head_dim = dim // n_heads
        self.causal = causal
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=bias)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=bias)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=bias)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=bias)

    def forward(self, hidden: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        """Returns the output for ``hidden`` ``[micro, seq, dim]`` in the same shape.

        Args:
            context: may hold ``rotary_cosine`` and ``rotary_sine`` (see ``rotate``), and either ``attention_mask``, a
                bool tensor that broadcasts to ``[micro, heads, seq, seq]`` and replaces the causal mask, or
                ``packed_attention.BOUNDARIES`` of documents, inside which attention is causal.
        """
        query, key, value = (
            projection(hidden).unflatten(-1, (-1, self.head_dim)) for projection in (self.wq, self.wk, self.wv)
        )
        if "rotary_cosine" in context:
            query = rotate(query, context["rotary_cosine"], context["rotary_sine"])
            key = rotate(key, context["rotary_cosine"], context["rotary_sine"])
        return self.wo(self._attend(query, key, value, context).flatten(2))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        """Returns ``[micro, seq, heads, head_dim]``, the shape of ``query``."""
        mask = context.get("attention_mask")
        if packed.BOUNDARIES in context:
            kernel = packed.kernel_for(query.device, query.dtype, self.head_dim)
            if kernel != packed.MASK:
                return packed.attend_inside_documents(kernel, query, key, value, context[packed.BOUNDARIES])
            mask = packed.document_mask(context["document_ids"])
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
        return F.scaled_dot_product_attention(**_call(query, key, value, mask, self.causal)).transpose(1, 2)

    def backend(self, length: int, dtype: torch.dtype, device: torch.device, context: Mapping[str, Tensor]) -> str:
        """Returns which implementation computes the attention of sequences of ``length`` tokens, for the log.

        Args:
            dtype: the dtype of the projected tensors, which autocast may have chosen.
            context: that of a batch.
        """
        if "document_ids" not in context:
            return self._choice(length, dtype, device, masked=False)
        missing = packed.without_kernel(context, device, dtype, self.head_dim)
        if not missing:
            return packed.description(packed.kernel_for(device, dtype, self.head_dim))
        choice = self._choice(length, dtype, device, masked=True)
        return f"{choice} with a mask of {length} x {length} elements, because {missing}"

    def _choice(self, length: int, dtype: torch.dtype, device: torch.device, masked: bool) -> str:
        """Returns which implementation ``scaled_dot_product_attention`` chooses."""
        widths = (projection.out_features for projection in (self.wq, self.wk, self.wv))
        query, key, value = (
            torch.empty(
                1, width // self.head_dim, length, self.head_dim, dtype=dtype, device=device, requires_grad=True
            )
            for width in widths
        )
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=device) if masked else None
        call = _call(query, key, value, mask, self.causal)
        name = SDPBackend(torch._fused_sdp_choice(**call)).name.removesuffix("_ATTENTION").lower()
        return f"scaled_dot_product_attention uses its {name} implementation"


def _call(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> dict[str, Any]:
    """Returns the arguments of ``scaled_dot_product_attention`` for heads ``[micro, heads, seq, head_dim]``.

    On GPUs only flash attention has grouped queries everywhere, and it has neither masks nor fp32. The memory-efficient
    kernel has both, but needs the keys and values of every query. Otherwise torch would fall back to its plain
    implementation, which keeps scores of ``micro x heads x seq x seq`` for the backward pass.
    """
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.is_cuda and (mask is not None or query.dtype not in (torch.float16, torch.bfloat16)):
        times = query.shape[1] // key.shape[1]
        key, value = (heads.repeat_interleave(times, dim=1) for heads in (key, value))
        grouped = False
    return {
        "query": query,
        "key": key,
        "value": value,
        "attn_mask": mask,
        "is_causal": causal and mask is None,
        "enable_gqa": grouped,
    }


def attention_backend(parts: Iterable[nn.Module], batch: Batch, dtype: torch.dtype, device: torch.device) -> str | None:
    """Returns which implementation computes the attention in the layers of ``parts`` for ``batch``, None without."""
    for part in parts:
        attention = next((module for module in part.modules() if isinstance(module, Attention)), None)
        if attention is not None and isinstance(part, Model):
            length = part.hidden_shape(batch.inputs)[1]
            return attention.backend(length, dtype, device, batch.context)
    return None


@dataclass(frozen=True)
class RotaryScaling:
    """Scales rotary frequencies as Llama 3.1 does for sequences longer than those of the pre-training.

    A frequency with fewer than ``low_freq_factor`` periods in the original length is divided by ``factor``. One with
    more than ``high_freq_factor`` periods does not change, and those between are interpolated. The formula is that of
    Meta's ``apply_scaling`` (github.com/meta-llama/llama-models); the names are those of Hugging Face.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float

    def factors(self, frequencies: Tensor) -> Tensor:
        """Returns the factor for each of ``frequencies``, which are in radians per position."""
        periods = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = (periods - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = kept.clamp(0, 1)
        return kept + (1 - kept) / self.factor


def rotary_tables(
    positions: Tensor, head_dim: int, theta: float, scaling: RotaryScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the cosine and sine of every position's angles.

    Args:
        positions: integers of any shape ``[...]``.
        head_dim: the width of a head, an even number.
        theta: the base of the frequencies ``theta ** (-2 i / head_dim)``.

    Returns:
        Two tensors ``[..., head_dim]``. They are float32 even under fp64, since the table is part of the model's
        definition.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    periods = theta**exponents
    angles = positions.unsqueeze(-1).float() / periods
    if scaling is not None:
        angles = angles * scaling.factors(1 / periods)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotates ``heads`` ``[micro, seq, heads, head_dim]`` by tables ``[seq, head_dim]`` or ``[micro, seq, head_dim]``.

    Half-precision heads are rotated in float32 and rounded once, since rounded tables would lose the relative positions
    in long sequences.
    """
    first, second = heads.chunk(2, dim=-1)
    swapped = torch.cat((-second, first), dim=-1)
    return (heads * cosine.unsqueeze(-2) + swapped * sine.unsqueeze(-2)).to(heads.dtype)


class RotaryCache:
    """Caches the tables of positions ``0 … length - 1`` for the longest sequence seen on each device.

    The tables are not buffers of the model, so they need no memory while the model is on ``meta``, are not saved in
    checkpoints, and do not limit the sequence length. They are read outside compiled layers.
    """

    def __init__(self, head_dim: int, theta: float, scaling: RotaryScaling | None = None) -> None:
        self._head_dim = head_dim
        self._theta = theta
        self._scaling = scaling
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def tables(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the cosine and sine tables, each ``[length, head_dim]``."""
        known = self._tables.get(device)
        if known is None or known[0].shape[0] < length:
            with torch.inference_mode(False), torch.no_grad():
                positions = torch.arange(length, device=device)
                known = rotary_tables(positions, self._head_dim, self._theta, self._scaling)
            self._tables[device] = known
        return known[0][:length], known[1][:length]
