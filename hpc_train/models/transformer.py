"""Implements the layer, the norms, the head and the losses that the built-in transformers share.

A loss returns a sum and the number of targets, so that the mean is computed once over the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from hpc_train.data.dataset import IGNORED
from hpc_train.models.model import Head
from hpc_train.models.own_loss import alone, call_loss

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


class RMSNorm(nn.RMSNorm):
    """Normalizes hidden states by their root mean square, under autocast as ``_normalized`` describes."""

    def forward(self, hidden: Tensor) -> Tensor:
        return _normalized(self, F.rms_norm, hidden, (self.weight,))


class OffsetRMSNorm(RMSNorm):
    """Normalizes hidden states by their root mean square and multiplies them by ``1 + weight``, like Gemma."""

    def forward(self, hidden: Tensor) -> Tensor:
        return _normalized(self, _offset_rms_norm, hidden, (self.weight,))


def _offset_rms_norm(hidden: Tensor, shape: tuple[int, ...], weight: Tensor, eps: float | None) -> Tensor:
    """Computes in fp32, since half precision would round ``1 + weight`` to three digits."""
    return F.rms_norm(widened(hidden), shape, 1 + widened(weight), eps).to(hidden.dtype)


class LayerNorm(nn.LayerNorm):
    """Normalizes hidden states by mean and variance, under autocast as ``_normalized`` describes."""

    def forward(self, hidden: Tensor) -> Tensor:
        return _normalized(self, F.layer_norm, hidden, (self.weight, self.bias))


def _normalized(
    norm: nn.RMSNorm | nn.LayerNorm, function: Callable[..., Tensor], hidden: Tensor, parameters: Iterable[Tensor]
) -> Tensor:
    """Returns ``function(hidden, shape, *parameters, eps)``; under autocast its result has the compute dtype.

    The parameters are then rounded to the compute dtype, as under ZeRO, so that the results of all strategies are
    equal. Autocast alone would convert to fp32 on GPUs, and every projection would convert the result back. The kernels
    compute in fp32 internally.
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
    if dtype is None:
        return values
    return values.to(dtype)


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


class PreNormLayer(nn.Module):
    """Adds an attention branch and a feed-forward branch, both with a norm, to hidden states ``[micro, tokens, dim]``.

    ``norm`` returns a new norm for one branch. With ``post_norms``, the output of each branch has a norm too, as in
    Gemma 2.
    """

    def __init__(
        self,
        norm: Callable[[], nn.Module],
        attention: nn.Module,
        ffn: nn.Module,
        dropout: float,
        post_norms: bool = False,
    ) -> None:
        super().__init__()
        self.attention_norm = norm()
        self.attention = attention
        self.attention_post_norm = norm() if post_norms else None
        self.ffn_norm = norm()
        self.ffn = ffn
        self.ffn_post_norm = norm() if post_norms else None
        self.dropout = nn.Dropout(dropout) if dropout else None

    def forward(self, hidden: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        mixed = self.attention(self.attention_norm(hidden), context)
        hidden = hidden + self._finished(mixed, self.attention_post_norm)
        return hidden + self._finished(self._feed_forward(self.ffn_norm(hidden), context), self.ffn_post_norm)

    def _feed_forward(self, hidden: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        result: Tensor = self.ffn(hidden)
        return result

    def _finished(self, branch: Tensor, post_norm: nn.Module | None) -> Tensor:
        """Returns the result of ``branch`` after its norm, if any. Absent modules are None, since calling a module
        costs host time."""
        normed = branch if post_norm is None else post_norm(branch)
        if self.dropout is None:
            return normed
        return self.dropout(normed)


class CrossEntropyHead(Head):
    """Computes the cross-entropy of the logits ``[..., classes]`` that its forward pass returns.

    Attributes:
        chunks: the number of chunks of the sequence, for heads with logits at every position. Only the logits of one
            chunk exist at a time, and the backward pass computes them again; see also ``LinearHead``.
        sequence_shards: the number of shards of the sequence in the hidden states; the logits cover the full sequence.
        z_loss: the coefficient of the z-loss in training; see ``cross_entropy_with_z``.
    """

    chunks: int = 1
    sequence_shards: int = 1
    z_loss: float = 0.0

    @property
    def own_count(self) -> bool:
        return self._overrides_loss

    @property
    def _overrides_loss(self) -> bool:
        """Returns whether a subclass overrides the loss."""
        return type(self).loss is not CrossEntropyHead.loss or type(self)._loss is not CrossEntropyHead._loss

    def loss(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if self.chunks == 1:
            return self._loss(hidden, targets)
        # the RNG state is not saved, since a head has no random operations
        sums = [
            checkpoint(self._loss, *chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in self._cut(hidden, targets)
        ]
        loss, count = (torch.stack(column).sum() for column in zip(*sums, strict=True))
        return loss, count

    def compile_with(self, compiler: Compiler) -> None:
        """Compiles the loss, unless a subclass overrides it; evaluations compute it with eager operators."""
        if not self._overrides_loss:
            self._loss = compiler(self._loss)  # type: ignore[method-assign]

    def correct(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return torch.stack(
            [count_correct(self(part), chunk_targets) for part, chunk_targets in self._cut(hidden, targets)]
        ).sum()

    def evaluate(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        if self._overrides_loss:
            if self.observe is not None:
                for part, chunk_targets in self._cut(hidden, targets):
                    self.observe(self(part), chunk_targets)
            # ``correct`` counts targets, but such a loss may count something else
            overrides = type(self).correct is not CrossEntropyHead.correct
            sum_and_count = call_loss(self.loss, False, hidden, targets, alone)
            return (*sum_and_count, self.correct(hidden, targets) if overrides else None)
        sums = [self._evaluate(*chunk) for chunk in self._cut(hidden, targets)]
        loss, count, correct = (torch.stack(column).sum() for column in zip(*sums, strict=True))
        return loss, count, correct

    def _loss(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self(hidden)
        if self.z_loss:
            return cross_entropy_with_z(logits, targets, self.z_loss)
        return cross_entropy(logits, targets)

    def _evaluate(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self(hidden)
        if self.observe is not None:
            self.observe(logits, targets)
        return (*cross_entropy(logits, targets), count_correct(logits, targets))

    def _cut(self, hidden: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Splits both along the sequence (dim 1).

        Each rank splits its shard. The logits of a chunk are gathered from the same piece of every shard, so its
        targets are taken from the same pieces.
        """
        if self.chunks == 1:
            return [(hidden, targets)]
        sharded = targets.unflatten(1, (self.sequence_shards, -1)).chunk(self.chunks, 2)
        pieces = zip(hidden.chunk(self.chunks, 1), sharded, strict=True)
        return [(part, chunk_targets.flatten(1, 2)) for part, chunk_targets in pieces]


def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum of the negative log-likelihoods in nats, and the number of targets that are not ``IGNORED``.
    ``logits`` have the shape ``[..., classes]``, and the int64 ``targets`` the shape ``[...]``. Half precision is
    converted to float32 first."""
    flat = widened(logits).flatten(0, -2)
    loss = F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, (targets != IGNORED).sum()


def cross_entropy_with_z(logits: Tensor, targets: Tensor, coefficient: float) -> tuple[Tensor, Tensor]:
    """Returns the result of ``cross_entropy``, with ``coefficient`` times the z-loss added to the sum.

    The z-loss of a token is the square of ``log(sum(exp(logits)))`` (Chowdhery et al. 2022, arXiv:2204.02311, section
    5, with a coefficient of 1e-4). Cross-entropy alone does not change if the same number is added to all logits; the
    z-loss prevents a drift of this number. Tokens whose target is ``IGNORED`` do not count.
    """
    flat = widened(logits).flatten(0, -2)
    loss: Tensor = _WithZ.apply(flat, targets.flatten(), coefficient)
    return loss, (targets != IGNORED).sum()


class _WithZ(torch.autograd.Function):
    """Sums cross-entropy and z-loss of logits ``[tokens, classes]`` from one softmax, and computes their gradient from
    it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, coefficient: float) -> Tensor:
        chances = F.log_softmax(logits, -1)
        total = F.nll_loss(chances, targets, ignore_index=IGNORED, reduction="sum")
        words = targets.clamp(min=0).unsqueeze(-1)
        normalizer = (logits.gather(-1, words) - chances.gather(-1, words)).squeeze(-1)  # log(sum(exp(logits)))
        ctx.save_for_backward(chances, targets, normalizer)
        ctx.coefficient = coefficient
        return total + coefficient * torch.where(targets != IGNORED, normalizer.square(), 0.0).sum()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None]:
        chances, targets, normalizer = ctx.saved_tensors
        gradient = chances.exp().mul_((1 + 2 * ctx.coefficient * normalizer).unsqueeze(-1))
        gradient[torch.arange(len(targets), device=targets.device), targets.clamp(min=0)] -= 1
        return gradient.mul_(((targets != IGNORED) * scale).unsqueeze(-1)), None, None


def squared_error(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum of squared differences over the elements whose target is not ``IGNORED``, and their number.

    ``outputs`` and ``targets`` have the same shape. Targets of any dtype are converted to the dtype of ``outputs``, at
    least float32.
    """
    wide = widened(outputs)
    counts = targets != IGNORED
    difference = torch.where(counts, wide - targets.to(wide.dtype), 0.0)
    return difference.square().sum(), counts.sum()


def count_correct(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the number of targets (int64) with the largest of their ``logits``; ignored targets do not count."""
    return (logits.argmax(dim=-1) == targets).sum()


def widened(values: Tensor) -> Tensor:
    """Returns half precision as float32, and other dtypes unchanged."""
    if values.dtype in (torch.float16, torch.bfloat16):
        return values.float()
    return values
