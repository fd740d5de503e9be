"""Checks that a ``Model`` is complete, and that its stem and layers return hidden states of the announced shape.

A method that is missing would otherwise fail in the middle of a build, or train values that were never set. A wrong
shape would end the workers of a pipeline in the communication library, without a message about the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hpc_train.errors import UserError
from hpc_train.models.model import Head, Model

METHODS = ("hidden_shape", "init_parameter", "init_buffers", "flops_per_sample")


def check_parts(model: Model, where: str) -> None:
    """Checks the methods and parts of a whole model.

    Raises:
        UserError: a method is not implemented, or the stem, the layers or the head cannot be used.
    """
    problems = [f"{name} is not implemented" for name in METHODS if getattr(type(model), name) is getattr(Model, name)]
    problems += _problems_of_parts(model)
    if problems:
        raise UserError(
            f"the model {type(model).__name__} is not complete: {'; '.join(problems)}",
            where=where,
            fix="see hpc_train.models.model.Model, and examples/own_pipeline_model.py for a complete model",
        )


def _problems_of_parts(model: Model) -> Iterator[str]:
    parts: dict[str, Any] = {name: getattr(model, name, None) for name in ("stem", "layers", "head")}
    yield from (f"{name} is not set" for name, part in parts.items() if part is None)
    stem, layers, head = parts.values()
    if stem is not None and not isinstance(stem, nn.Module):
        yield f"stem is a {type(stem).__name__}, but must be an nn.Module"
    if layers is not None and not isinstance(layers, nn.ModuleDict):
        yield f'layers is a {type(layers).__name__}, but must be an nn.ModuleDict with the keys "0", "1", ...'
    elif layers is not None and list(layers) != [str(index) for index in range(len(layers))]:
        yield f'the keys of layers are {", ".join(layers)}, but must be "0", "1", ... in this order'
    if head is not None and not isinstance(head, Head):
        yield f"head is a {type(head).__name__}, but must derive from hpc_train.models.model.Head"
    elif head is not None and type(head).loss is Head.loss:
        yield f"the head {type(head).__name__} does not implement loss"


def check_hidden_shape(model: Model, inputs: Tensor, context: Mapping[str, Tensor]) -> None:
    """Runs the stem and the layers on ``meta``, which computes only shapes, and compares each with ``hidden_shape``.

    A model that cannot run on ``meta`` is not checked.

    Args:
        model: the whole model on ``meta``.
        inputs, context: those of a micro-batch, on any device.

    Raises:
        UserError: a shape differs from ``hidden_shape``, which is that of the messages between pipeline stages.
    """
    inputs = inputs.to("meta", torch.float32) if inputs.is_floating_point() else inputs.to("meta")
    stated = _stated_shape(model, inputs)
    for part, shape in _shapes(model, inputs, {name: value.to("meta") for name, value in context.items()}):
        if shape != stated:
            raise UserError(
                f"{part} of the model {type(model).__name__} returns hidden states of shape {shape}, but hidden_shape "
                f"returns {stated} for inputs of shape {tuple(inputs.shape)}",
                where=f"{type(model).__name__}.hidden_shape",
                fix="return from the stem and from each layer one tensor of the shape that hidden_shape returns",
            )


def _stated_shape(model: Model, inputs: Tensor) -> tuple[int, ...]:
    stated = model.hidden_shape(inputs)
    if isinstance(stated, tuple) and len(stated) > 1 and all(isinstance(size, int) for size in stated):
        return tuple(stated)
    raise UserError(
        f"hidden_shape of the model {type(model).__name__} returns {stated!r} for inputs of shape "
        f"{tuple(inputs.shape)}",
        where=f"{type(model).__name__}.hidden_shape",
        fix="return a tuple of two or more integers, of which the first is the number of samples: (len(inputs), width)",
    )


def _shapes(model: Model, inputs: Tensor, context: Mapping[str, Tensor]) -> Iterator[tuple[str, Any]]:
    """Yields each part and the shape, or the type, of what it returns; ends early if a part cannot run on ``meta``."""
    hidden: Any = inputs
    parts = {"stem": model.stem} | {f"layers.{key}": layer for key, layer in model.layers.items()}
    training = model.training
    model.eval()  # without dropout, which draws random numbers
    try:
        with torch.no_grad():
            context = model.prepare(inputs, context)
            for name, part in parts.items():
                assert part is not None
                hidden = part(hidden, context)
                yield name, tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
    except UserError:
        raise
    except Exception:  # the training itself reports an error that is not due to meta
        return
    finally:
        model.train(training)
