"""Computes several projections of one input as one product, while a training step keeps their weights together.

A product with the weights of queries, keys and values reads its input once instead of three times, and the backward
pass writes the gradient of the input once instead of adding three. With grouped queries the products of keys and values
alone are too narrow for a GPU to be fast. But the weights must be concatenated, and the gradients of the results as
well, since they come one by one:

- Weights are concatenated once per step, when they are cast (``parallel/precision/dtypes.py``); their gradient is
  cut into views. Without these casts each projection is computed on its own: in evaluation, in fp32, under tensor
  parallelism and under ZeRO, which gathers parameters again and would keep a second copy of them for the backward pass.
- The gradients of queries, keys and values are small: one copy of them is less than the two sums that it saves.

The two wide projections of a gated feed-forward layer stay separate. Their gradients are several times wider than their
input: on an H200 the kernel of the activation took 1.17 ms to write them side by side and 0.63 ms to write them apart
(32,768 tokens, 2 x 8192 columns, compiled, torch 2.11), and their products are as fast alone.

The gradient of the input is rounded once instead of once per projection, so in half precision the results differ from
those of separate products by that rounding. Names and values of the parameters are not affected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CASTS = "kept_casts"  # the attribute of a module with its casts: those of the weight and of the bias, if it has one
JOINED = "joined_casts"  # the attribute of an owner: the weight and the bias of its projections together


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
    """Returns the weight of ``module`` in the dtype of products: the cast that the step keeps, if there is one."""
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
    """Returns whether nothing but a product happens in ``projections``: plain linear layers without hooks."""
    biased = {getattr(projection, "bias", None) is not None for projection in projections}
    weights = [projection._parameters.get("weight") for projection in projections]
    trained = {weight is not None and weight.requires_grad for weight in weights}
    return (
        all(type(projection) is nn.Linear and not _has_hooks(projection) for projection in projections)
        and all(type(weight) is nn.Parameter for weight in weights)  # a shard of tensor parallelism is a DTensor
        and len(biased) == len(trained) == 1
        and len({*map(id, weights)}) == len(weights)
    )


def _has_hooks(module: nn.Module) -> bool:
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(kinds)
