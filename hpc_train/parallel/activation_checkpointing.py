"""Activation checkpointing: layers keep only their input and compute the rest again in the backward.

``full`` does so for every layer, ``selective`` for every second one (by its global number): half the memory saved for
half of the extra forward. Chen et al. 2016, arXiv:1604.06174.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from hpc_train.config.errors import ConfigError
from hpc_train.models.model import Model

MODES = ("none", "full", "selective")


def apply(model: nn.Module, mode: str) -> None:
    """Wraps the layers of ``model`` (whole or a stage) in place; ``naming.canonical_name`` hides the wrappers.

    Raises:
        ConfigError: ``mode`` is unknown, or the model has no ``layers``.
    """
    where = "train.activation_checkpointing"
    if mode not in MODES:
        raise ConfigError(f"activation checkpointing {mode!r} is unknown", where=where, mend=f"one of {MODES}")
    if mode == "none":
        return
    if not isinstance(model, Model):
        raise ConfigError(
            "the model has no layers that are known, so none can be checkpointed",
            where=where,
            mend="none, or a model with stem, layers and head (hpc_train.models.model.Model)",
        )
    for key, layer in list(model.layers.items()):
        if mode == "full" or int(key) % 2 == 0:
            model.layers[key] = checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
