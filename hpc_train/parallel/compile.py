"""torch.compile per layer: equal layers are compiled once, and names stay as they are."""

from __future__ import annotations

from torch import nn


def compile_layers(model: nn.Module) -> None:
    """Compiles each layer of ``model`` in place, or the whole model where it has no ``layers``.

    After activation checkpointing is applied and before the model is sharded.
    """
    layers = getattr(model, "layers", None)
    for module in layers.values() if isinstance(layers, nn.ModuleDict) else (model,):
        module.compile()
