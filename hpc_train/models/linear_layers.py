"""Finds the linear layers of a model, and computes several projections of the same input as one product.

A product with the weights of queries, keys and values reads its input once instead of three times, and the backward
pass writes the gradient of the input once instead of adding three gradients. With grouped queries, the separate
products of keys and values are too narrow to be fast on a GPU. Weights are concatenated once per step, when they are
cast (``parallel/precision/dtypes.py``); their gradient is divided into views. Without these casts, each projection is
computed separately: in evaluation, in fp32, under tensor parallelism, and under ZeRO, which gathers parameters again
and would keep a second copy of them for the backward pass. The gradients of the results are concatenated, too; this
copy costs less than the two sums that it saves.

The two wide projections of a gated feed-forward layer stay separate, since their gradients are several times wider than
their input: on an H200, the kernel of the activation took 1.17 ms to write the gradients into one tensor and 0.63 ms to
write them separately (32,768 tokens, 2 x 8192 columns, compiled, torch 2.11), and separate products are equally fast.

The gradient of the input is rounded once instead of once per projection, so in half precision the results differ from
separate products by this rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpc_train.layout.float8 import Products
from hpc_train.models.model import Model, canonical_name
from hpc_train.models.wrapped import layers_of


def linear_layers(model: nn.Module, plain: Sequence[type] = (nn.Linear,)) -> Iterator[tuple[str, nn.Linear, str]]:
    """Yields the linear layers of ``model`` (complete or a stage): name, module, and the reason why it is excluded, or
    "".

    A layer is included if it trains, its class is in ``plain`` (classes that only multiply), and it is in the layers or
    blocks of the model, or anywhere if the model has neither.
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
    """A call of a linear layer. ``input`` identifies its input tensor, which had ``rows`` rows."""

    name: str
    module: nn.Linear
    input: tuple[int, int]
    rows: int


@contextmanager
def calls_of(model: nn.Module, address: Callable[[Tensor], int]) -> Iterator[list[Call]]:
    """Yields a list to which the calls of the included linear layers of ``model`` are appended in order. ``address``
    identifies the memory of a tensor."""
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
    """Returns the products of a forward.

    Consecutive calls with the same input are grouped, and so are equal groups in several layers.

    Args:
        layers: the names of the layers or blocks.
        samples: the number of samples of the micro-batch.
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
    """Returns ``name`` without the name of its layer."""
    return next((name.removeprefix(layer) for layer in layers if name == layer or name.startswith(f"{layer}.")), name)


CASTS = "kept_casts"  # the attribute of a module with the casts of its weight and of its bias, if it has one
JOINED = "joined_casts"  # the attribute of an owner with the concatenated weights and biases of its projections


@dataclass(frozen=True)
class Together:
    """Names the projections of a module that have the same input."""

    names: tuple[str, ...]

    def of(self, owner: nn.Module) -> list[Any]:
        return [getattr(owner, name) for name in self.names]


def project(owner: Any, hidden: Tensor) -> Sequence[Tensor]:
    """Returns the results of the projections ``owner.together`` for ``hidden``, as views of one tensor if possible."""
    joined: tuple[Tensor, Tensor | None] | None = owner.__dict__.get(JOINED)
    projections = owner.together.of(owner)
    if joined is None or joined[0].dtype != product_dtype(hidden):
        return [projection(hidden) for projection in projections]
    return F.linear(hidden, *joined).split([projection.out_features for projection in projections], -1)


def cast_weight(module: nn.Linear) -> Tensor:
    """Returns the weight of ``module`` in the dtype of products; the cast that the step keeps, if there is one."""
    cast: tuple[Tensor, Tensor | None] | None = getattr(module, CASTS, None)
    dtype = product_dtype(module.weight)
    if cast is not None and cast[0].dtype == dtype:
        return cast[0]
    return module.weight.to(dtype)


def product_dtype(values: Tensor) -> torch.dtype:
    """Returns the dtype of matrix products with ``values``, which autocast may choose."""
    kind = values.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return values.dtype


def can_join(projections: Sequence[nn.Module]) -> bool:
    """Returns whether ``projections`` compute only products, i.e. are plain linear layers without hooks."""
    biased = {getattr(projection, "bias", None) is not None for projection in projections}
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    weights = [projection._parameters.get("weight") for projection in projections]
    trained = {weight is not None and weight.requires_grad for weight in weights}
    return (
        all(type(projection) is nn.Linear for projection in projections)
        and not any(getattr(projection, name) for projection in projections for name in hooks)
        and all(type(weight) is nn.Parameter for weight in weights)  # a shard of tensor parallelism is a DTensor
        and len(biased) == len(trained) == 1
        and len({*map(id, weights)}) == len(weights)
    )
