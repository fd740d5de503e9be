"""Computes attention of transformers' decoders inside packed documents and sliding windows without masks.

transformers expresses both as a mask of ``seq x seq`` elements, which flash attention does not take, and waits for the
device to find out whether documents are packed. Here the layers pass the boundaries of documents on to a function that
is registered in transformers as an implementation of attention, and that calls the kernels of ``packed_attention``.
Without boundaries it is transformers' ``sdpa``.

Models with another implementation keep it: Gemma 2 has a soft cap, for which transformers uses plain operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hpc_train.data.dataset import Batch
from hpc_train.data.device_copy import DOCUMENT_ENDS
from hpc_train.models import packed_attention as packed
from hpc_train.models.packed_attention import Scores

_NAME = "hpc_train"  # of the implementation
_GIVEN = frozenset(("attention_mask", "positions", "position_ids", "document_ids"))  # what limits attention in a batch
_IDS = "document_ids"  # an argument that layers pass on to it, as they do with packed_attention.BOUNDARIES


def use_kernels(module: Any) -> bool:
    """Replaces ``sdpa`` in a model of transformers; returns whether it did.

    No kernel has dropout of attention weights.
    """
    config = module.config
    if config._attn_implementation != "sdpa" or getattr(config, "attention_dropout", 0.0):
        return False
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    module.set_attn_implementation(_NAME)
    return True


def limits(
    context: Mapping[str, Tensor], inputs: tuple[int, int], device: torch.device, window: int | None
) -> dict[str, Any] | None:
    """Returns the arguments of layers whose attention takes boundaries; None if it needs a mask or no limit.

    Args:
        context: that of a batch.
        inputs: the number of sequences, and of tokens in each.
        window: the number of tokens to which a token attends, itself included; None is all.
    """
    if "attention_mask" in context or not packed.has_kernels(device):
        return None
    if DOCUMENT_ENDS in context:
        return packed.document_context(context) | {_IDS: context["document_ids"]}
    if _GIVEN & context.keys():
        return None  # positions may begin again
    return packed.local_context(context, inputs, device, Scores(window=window)) or None


def backend(
    config: Any, batch: Batch, dtype: torch.dtype, device: torch.device, head_dim: int, window: int | None
) -> str | None:
    """Returns which implementation limits the attention of layers with ``window``; None if nothing limits it.

    Args:
        config: that of a model for which ``use_kernels`` was called.
    """
    context = batch.context
    length = batch.inputs.shape[1]
    scores = Scores(window=window if packed.is_narrow(Scores(window=window), length) else None)
    given = _GIVEN & context.keys()
    if not given and scores.window is None:
        return None
    if config._attn_implementation != _NAME:
        missing = f"transformers computes the attention of this model by {config._attn_implementation}"
    elif "attention_mask" in given:
        missing = "the data has an attention_mask"
    elif given and "document_ids" not in given:
        missing = "the data has positions but no document_ids"
    else:
        missing = packed.without_kernel(context, device, dtype, head_dim, scores)
    if missing:
        return f"a mask of {length} x {length} elements, because {missing}"
    return packed.description(packed.kernel_for(device, dtype, head_dim), scores)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Implements attention as transformers calls it.

    Args:
        query: ``[micro, heads, seq, head_dim]``.
        key, value: ``[micro, kv_heads, seq, head_dim]``.
        attention_mask: None with boundaries.
        options: may hold ``packed_attention.BOUNDARIES``, and ``_IDS`` if documents are packed.

    Returns:
        ``[micro, seq, heads, head_dim]``, and None in place of the weights.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    boundaries = options.pop(packed.BOUNDARIES, None)
    ids = options.pop(_IDS, None)
    if boundaries is not None:
        length = query.shape[2]
        # under autocast, norms and rotations may return fp32; autocast casts the arguments of sdpa, but of no kernel
        query, key = query.to(value.dtype), key.to(value.dtype)
        scores = Scores(scaling, sliding_window if packed.is_narrow(Scores(window=sliding_window), length) else None)
        kernel = packed.kernel_of_scores(query.device, query.dtype, query.shape[3], scores)
        if kernel != packed.MASK:
            query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
            return packed.attend_inside_documents(kernel, query, key, value, boundaries, scores), None
        attention_mask = packed.attention_mask(ids, length, scores.window, query.device)
    plain: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **options
    )
    return plain
