"""Activation checkpointing: layers keep less of their forward and compute it again in the backward.

``full`` keeps only the input of every layer, ``selective:N`` does so in every N-th: 1/N of the memory saved for 1/N of
an extra forward (Chen et al. 2016, arXiv:1604.06174). ``ops`` keeps the results of matrix products and of attention in
every layer and computes only what is cheap again: norms, rotations, activations (Korthikanti et al. 2022,
arXiv:2205.05198, turn it round: attention again, the rest kept; fused attention has little left to save).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from hpc_train.config.values import parse_recomputation
from hpc_train.errors import UserError
from hpc_train.models.model import Model

_NAMES = (
    "mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip
PRODUCTS = frozenset(getattr(torch.ops.aten, name).default for name in _NAMES if hasattr(torch.ops.aten, name))


def apply(model: nn.Module, mode: str) -> None:
    """Wraps the layers of ``model`` (whole or a stage) in place; ``naming.canonical_name`` hides the wrappers.

    Raises:
        UserError: ``mode`` is unknown, or the model has no ``layers``.
    """
    recomputation = parse_recomputation(mode)
    if not recomputation.every:
        return
    if not isinstance(model, Model):
        raise UserError(
            "activation checkpointing needs the layers of the model, and this model has no stem, layers and head",
            where="train.activation_checkpointing",
            fix="none, or a model with stem, layers and head (hpc_train.models.model.Model)",
        )
    extra = {"context_fn": _keeping_products} if recomputation.keep_products else {}
    for key, layer in list(model.layers.items()):
        if recomputation.applies_to(int(key)):
            model.layers[key] = checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT, **extra)


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


_keeping_products = partial(create_selective_checkpoint_contexts, _policy)
