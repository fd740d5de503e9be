"""torch.compile per layer: equal layers are compiled once, and names stay as they are."""

from __future__ import annotations

from torch import nn

from hpc_train.models.model import Model


def compile_layers(model: nn.Module) -> None:
    """Compiles each layer of ``model`` in place, or the whole model where it has no ``layers``.

    After activation checkpointing is applied and before the model is sharded.
    """
    for module in model.layers.values() if isinstance(model, Model) else (model,):
        module.compile()
