"""Finds the linear layers of a model whose products another format may replace, and what they multiply."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from hpc_train.layout.float8 import Products
from hpc_train.models.model import Model, canonical_name
from hpc_train.models.wrapped import layers_of


def linear_layers(model: nn.Module, plain: Sequence[type] = (nn.Linear,)) -> Iterator[tuple[str, nn.Linear, str]]:
    """Yields the linear layers of ``model`` (whole or a stage): name, module, and why it cannot take part.

    Plain ones take part that train and are inside the layers or blocks of the model, or anywhere if it has neither.

    Args:
        plain: the classes that multiply and do nothing else.
    """
    layers = layers_of(model)
    inside = {inner for layer in layers for inner in layer.modules()}
    everywhere = not layers and not isinstance(model, Model)
    for raw, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield canonical_name(raw), module, _why_not(module, everywhere or module in inside, plain)


def _why_not(module: nn.Linear, inside: bool, plain: Sequence[type]) -> str:
    if not inside:
        return "not in a layer"
    if type(module) not in plain:
        return f"a {type(module).__name__}"
    if module.weight.requires_grad:
        return ""
    return "frozen"


@dataclass(frozen=True)
class Call:
    """One call of a linear layer. ``input`` identifies the tensor that it got, which had ``rows`` rows."""

    name: str
    module: nn.Linear
    input: tuple[int, int]
    rows: int


@contextmanager
def calls_of(model: nn.Module, address: Callable[[Tensor], int]) -> Iterator[list[Call]]:
    """Gives a list that gets the calls of the linear layers of ``model`` that can take part, in order.

    Args:
        address: identifies the memory of a tensor.
    """
    calls: list[Call] = []

    def follow(name: str, module: nn.Linear) -> Callable[[], None]:
        def begin(_: nn.Module, inputs: Sequence[Any]) -> None:
            given = inputs[0]
            place = address(given), int(given.storage_offset())
            calls.append(Call(name, module, place, given.numel() // module.in_features))

        return module.register_forward_pre_hook(begin).remove

    with ExitStack() as stack:
        for name, module, reason in linear_layers(model):
            if not reason:
                stack.callback(follow(name, module))
        yield calls


def products_of(calls: Sequence[Call], layers: Sequence[str], samples: int) -> tuple[Products, ...]:
    """Returns the products of a forward: calls in a row with one input together, and layers with equal ones as well.

    Args:
        layers: the names of the layers or blocks.
        samples: of the micro-batch.
    """
    alike: dict[tuple[Any, ...], list[list[str]]] = {}
    for _, same in groupby(calls, key=lambda call: (call.input, call.rows)):
        group = [*same]
        outputs = tuple(call.module.out_features for call in group)
        within = tuple(_within(call.name, layers) for call in group)
        key = within, group[0].module.in_features, outputs, group[0].rows / samples
        names = alike.setdefault(key, [[] for _ in group])
        for layer_names, call in zip(names, group, strict=True):
            layer_names.append(call.name)
    return tuple(Products(tuple(map(tuple, names)), *key[1:]) for key, names in alike.items())


def _within(name: str, layers: Sequence[str]) -> str:
    """Returns ``name`` without that of its layer."""
    return next((name.removeprefix(layer) for layer in layers if name == layer or name.startswith(f"{layer}.")), name)
