"""Chooses the number of chunks in which the loss of a large vocabulary is computed, and the form of the loss.

This module does not import torch.

Logits and their gradient have tokens x vocabulary elements each. For a vocabulary of 128,000 words they take more
memory than all activations of several layers. If the head ends with a single matrix, it computes the gradients together
with the loss (``models/linear_head.py``), so that only the logits of one chunk exist at a time.

Each chunk adds its contribution to the gradient of the matrix. This addition moves about 10 bytes per element in half
precision, while the chunk computes 6 operations per element and token. A chunk of 4096 tokens thus computes 2,500
operations per byte, ten times the ratio of a GPU (250 to 300 on H100 and H200), so the additions take less than a tenth
of the time of the head. If a chunk has as many tokens as the model is wide, it has as many logits as the matrix has
elements: smaller chunks would save less memory than the gradient of the matrix needs in any case. A chunk therefore has
at least 4096 tokens, or as many as the model is wide if that is more.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from hpc_train.config.extensions import family_of
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout

LEAST_TOKENS = 4096  # the minimum number of tokens of a chunk
LARGE = 4  # a vocabulary is large from this multiple of the width; smaller logits take less memory than a layer


@dataclass(frozen=True)
class LossForm:
    """Describes how the last stage computes the loss of a micro-batch.

    Attributes:
        chunks: the number of chunks of tokens.
        fused: whether the gradients are computed together with the loss. Otherwise the full logits are kept for the
            backward pass, or with several chunks computed again.
        z_loss: the coefficient of the z-loss.
    """

    chunks: int = 1
    fused: bool = False
    z_loss: float = 0.0

    @property
    def recomputes(self) -> bool:
        """Returns whether the logits are computed a second time."""
        return self.chunks > 1 and not self.fused


def loss_form(config: Config, layout: Layout) -> LossForm:
    """Returns the form of the loss that ``train.loss_chunks`` sets; ``auto`` uses chunks for a large vocabulary.

    The fused form keeps a gradient of the matrix from the forward to the backward pass. It is chosen if the last stage
    has one micro-batch at a time in flight, as under every schedule except ``gpipe`` and ``interleaved_zero_bubble``.
    With tensor parallelism it is always chosen, since only this form leaves the logits distributed over the ranks.
    """
    family = family_of(config.model)
    chunks = config.train.loss_chunks
    fuses = family.fuses_loss(config.model) and (layout.tp > 1 or layout.in_flight(layout.stages - 1) == 1)
    if chunks == "auto" and fuses and family.activations is not None:
        counts = family.activations(config.model, config.data)
        if counts.logits >= LARGE * counts.layer_input:
            tokens = layout.micro_size * counts.tokens // layout.cp
            chunks = max(1, ceil(tokens / max(LEAST_TOKENS, counts.layer_input)))
            return LossForm(chunks, fused=True, z_loss=config.train.z_loss)
    number = chunks if isinstance(chunks, int) else 1
    return LossForm(number, fused=fuses and (number > 1 or layout.tp > 1), z_loss=config.train.z_loss)


def check_loss_chunks(config: Config, layout: Layout) -> None:
    """Raises UserError if ``train.loss_chunks`` exceeds the number of tokens."""
    chunks = config.train.loss_chunks
    length = getattr(config.data, "sequence_length", None)
    if isinstance(chunks, str) or not length:  # another check refuses a length of 0
        return
    if loss_form(config, layout).fused:  # the fused form divides all tokens of a micro-batch
        most = length * layout.micro_size // layout.cp
        unit = "micro-batch"
    else:
        most = length // (layout.cp * layout.tp)
        unit = "sequence"
    if chunks > most:
        raise UserError(
            f"train.loss_chunks is {chunks}, but a rank has only {most} tokens of a {unit}",
            where="train.loss_chunks",
            fix=f"train.loss_chunks={most} or fewer",
        )
