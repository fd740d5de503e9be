"""The loss in chunks of the sequence, so that the logits of a large vocabulary never exist whole.

A micro-batch's logits take ``micro x sequence x vocabulary`` numbers, and as many again for their gradient: with 128 k
token ids far more than a layer's activations. In N chunks it is 1/N of that, for one more product with the output
matrix (each chunk is computed again in the backward).
"""

from __future__ import annotations

from torch import nn

from hpc_train.models.layer import CrossEntropyHead
from hpc_train.models.model import Model


def apply(model: nn.Module, chunks: int) -> None:
    """Tells the head of ``model`` (whole or a stage, already split by tensor parallelism), where there is one."""
    head = model.head if isinstance(model, Model) else None
    if isinstance(model, Model) and isinstance(head, CrossEntropyHead):
        head.chunks, head.sequence_shards = chunks, model.sequence_shards
