"""Switches a model between training and evaluation, and keeps the mode of the parts that differ from it.

The constructor of a model, or a hook, may put parts into evaluation mode: a frozen backbone with batch statistics, a
network that only measures a perceptual loss. ``nn.Module.train`` would switch them to training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from hpc_train.models.wrapped import WrappedModel


def all_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the modules of ``model``, and the user's own module, for which a ``WrappedModel`` stands."""
    bare = [model.bare] if isinstance(model, WrappedModel) else []
    return [*model.modules(), *bare]


def begin_training(model: nn.Module) -> None:
    """Switches ``model`` to training, and keeps in evaluation mode the parts that its constructor left in it.

    A model that is in evaluation mode as a whole, as those of ``from_pretrained`` are, trains as a whole.
    """
    modes = [(module, module.training) for module in all_modules(model)]
    top = model.bare if isinstance(model, WrappedModel) else model
    trains = top.training
    model.train()
    if trains:
        _restore(modes)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switches ``model`` to evaluation mode, and every part back to its mode at the end."""
    modes = [(module, module.training) for module in all_modules(model)]
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)  # a module may override it, to do more than set an attribute
        _restore(modes)


def parts_in_evaluation(model: nn.Module) -> list[str]:
    """Returns the outermost parts in evaluation mode of a model that trains."""
    parts: list[str] = []
    for name, module in model.named_modules():
        if not module.training and not any(name.startswith(f"{outer}.") for outer in parts):
            parts.append(name)
    return parts


def _restore(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training
