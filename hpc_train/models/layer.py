"""The layer and the head that the transformers share.

Losses are sums, returned with the number of targets, so that the mean is taken once over the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpc_train.data.dataset import IGNORED
from hpc_train.models.model import Head


class PreNormLayer(nn.Module):
    """Attention and feed-forward, each a normalised branch added to the hidden states ``[micro, tokens, dim]``.

    Args:
        norm: makes the norm of one branch.
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
    """A head whose forward gives logits ``[..., classes]``.

    Attributes:
        chunks: the sequence is cut into so many, one after the other: only one's logits exist at a time, and they are
            computed again in the backward. For heads that have logits for every position.
        sequence_shards: hidden states hold this share of the sequence, logits (gathered) all of it.
    """

    chunks: int = 1
    sequence_shards: int = 1

    @property
    def own_count(self) -> bool:
        return self._has_own_loss

    @property
    def _has_own_loss(self) -> bool:
        """Whether a subclass brings another loss."""
        return type(self).loss is not CrossEntropyHead.loss or type(self)._loss is not CrossEntropyHead._loss

    def loss(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if self.chunks == 1:
            return self._loss(hidden, targets)
        # RNG state is not kept: nothing in a head is random.
        sums = [
            checkpoint(self._loss, *chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in self._cut(hidden, targets)
        ]
        loss, count = (torch.stack(column).sum() for column in zip(*sums, strict=True))
        return loss, count

    def correct(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return torch.stack([count_correct(self(part), of) for part, of in self._cut(hidden, targets)]).sum()

    def evaluate(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        if self._has_own_loss:  # what ``correct`` counts here are targets, which that loss may not count
            counts_too = type(self).correct is not CrossEntropyHead.correct
            return (*self.loss(hidden, targets), self.correct(hidden, targets) if counts_too else None)
        sums = [self._evaluate(*chunk) for chunk in self._cut(hidden, targets)]
        loss, count, correct = (torch.stack(column).sum() for column in zip(*sums, strict=True))
        return loss, count, correct

    def _loss(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return cross_entropy(self(hidden), targets)

    def _evaluate(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self(hidden)
        return (*cross_entropy(logits, targets), count_correct(logits, targets))

    def _cut(self, hidden: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Pieces of both along the sequence (dim 1). Of shards each rank cuts its own, and a chunk's logits are of the
        same piece of every shard, so its targets are too."""
        if self.chunks == 1:
            return [(hidden, targets)]
        of_shards = targets.unflatten(1, (self.sequence_shards, -1)).chunk(self.chunks, 2)
        pieces = zip(hidden.chunk(self.chunks, 1), of_shards, strict=True)
        return [(part, wanted.flatten(1, 2)) for part, wanted in pieces]


def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the negative log-likelihoods in nats, and the number of targets that are not ``IGNORED`` (int64).

    Args:
        logits: ``[..., classes]``; half precision is widened to float32 first.
        targets: ``[...]`` int64.
    """
    flat = _widened(logits).flatten(0, -2)
    loss = F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, (targets != IGNORED).sum()


def squared_error(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of squared differences over the elements whose target is not ``IGNORED``, and their number (int64).

    Args:
        outputs: same shape as ``targets``.
        targets: any number format; taken in the format of ``outputs`` (at least float32).
    """
    wide = _widened(outputs)
    counts = targets != IGNORED
    difference = torch.where(counts, wide - targets.to(wide.dtype), 0.0)
    return difference.square().sum(), counts.sum()


def count_correct(logits: Tensor, targets: Tensor) -> Tensor:
    """Number of targets (int64) that are the largest of their ``logits`` ``[..., classes]``; ignored ones are not."""
    return (logits.argmax(dim=-1) == targets).sum()


def _widened(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
