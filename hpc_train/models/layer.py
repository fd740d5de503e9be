"""What the transformers share: a layer of two branches, and a head with a cross entropy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from hpc_train.models.losses import count_correct, cross_entropy
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
    """A head whose forward gives logits ``[..., classes]``."""

    def loss(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return cross_entropy(self(hidden), targets)

    def correct(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return count_correct(self(hidden), targets)

    def evaluate(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self(hidden)
        return (*cross_entropy(logits, targets), count_correct(logits, targets))
