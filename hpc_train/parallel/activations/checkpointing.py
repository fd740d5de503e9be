"""Wraps the layers that recompute a part of their forward in the backward pass.

Activation checkpointing ``full`` keeps only the input of every layer and recomputes the rest in the backward pass.
``selective:N`` does so in every N-th layer, for 1/N of the memory saved and 1/N of an extra forward pass (Chen et al.
2016, arXiv:1604.06174). ``ops`` keeps the results of matrix products and attention in every layer and recomputes only
cheap operations: norms, rotations and activation functions. Korthikanti et al. (2022, arXiv:2205.05198) recompute
attention instead, but fused attention leaves little memory to save. Under a budget ``plan.recomputation`` has chosen
one of the two, or neither, for each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from hpc_train.config.values import Recomputation
from hpc_train.errors import UserError
from hpc_train.models import packed_attention
from hpc_train.models.blocks import replace_block
from hpc_train.models.model import Model
from hpc_train.parallel.activations.buffers import Contexts, with_buffers

_NAMES = (
    "mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm", "_scaled_mm_v2", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip
PRODUCTS = frozenset((*(f"aten::{name}" for name in _NAMES), *packed_attention.OPERATORS))


def apply_activation_checkpointing(model: nn.Module, recomputation: Recomputation, compiled: bool = False) -> None:
    """Wraps the layers or blocks of ``model`` (whole or a stage) in place.

    ``canonical_name`` removes the wrappers from names.

    Args:
        compiled: whether the layers will be compiled.

    Raises:
        UserError: the model has neither ``layers`` nor blocks.
    """
    if not recomputation.recomputes:
        return
    if isinstance(model, Model):
        names = [f"layers.{key}" for key in model.layers]
    else:
        names = getattr(model, "block_names", ())
    if not names and not isinstance(model, Model):  # of which a stage may have no layer
        raise UserError(
            "activation checkpointing wraps the layers of the model, but no repeated blocks were found in this model",
            where="train.activation_checkpointing",
            fix="use none, or name the classes of the blocks: model.wrap=[Block]",
        )
    for position, name in enumerate(names):
        number = int(name.rpartition(".")[2]) if isinstance(model, Model) else position
        mode = recomputation.mode(number)
        if mode != "none":
            block = model.get_submodule(name)
            contexts: Callable[[], Contexts] | None = _save_products if mode == "ops" else None
            if not compiled and any(True for _ in block.buffers()):  # compiled code changes buffers once
                contexts = with_buffers(block, contexts)
            extra = {} if contexts is None else {"context_fn": contexts}
            wrapper = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT, **extra)
            replace_block(model, name, wrapper)


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operator.name() in PRODUCTS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


_save_products = partial(create_selective_checkpoint_contexts, _policy)
