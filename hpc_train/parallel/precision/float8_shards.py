"""Multiplies shards of tensor parallelism in fp8, in the place of ``F.linear`` of DTensors.

A product of shards is computed from local tensors, since torchao's tensors in fp8 know no meshes. Its input and its
result are DTensors, as the plan of the model expects: a weight that is split by outputs takes the whole input and gives
a part of the outputs, and one that is split by inputs takes a part of the input and gives sums that are pending.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard

from hpc_train.errors import UserError
from hpc_train.layout.float8 import MULTIPLES, OFF, WHERE, refused_shard

OUT, IN = 0, 1  # the dimensions of a weight


@dataclass(frozen=True)
class Shards:
    """Describes how the tensor-parallel ranks hold a weight.

    Attributes:
        dim: the dimension that they share, ``OUT`` or ``IN``.
        group: the name of their process group.
    """

    dim: int
    group: str


def shards_of(name: str, weight: DTensor, recipe: str) -> Shards:
    """Returns how tensor-parallel ranks share a weight.

    Raises:
        UserError: ``weight``, the weight of the layer ``name``, is not split, or its shards cannot be computed in fp8.
    """
    placement = weight.placements[0]
    if not isinstance(placement, Shard):
        raise UserError(
            f"the tensor-parallel plan of the model does not split {name}.weight, which precision.fp8 does not support",
            where=f"{WHERE}, strategy.tp",
            fix=f"precision.fp8_skip=['{re.escape(name)}'], or {OFF}",
        )
    mesh = weight.device_mesh
    size = weight.shape[placement.dim]
    if size % (MULTIPLES[recipe] * mesh.size()):
        raise refused_shard(recipe, f"{name}.weight", size, mesh.size())
    return Shards(placement.dim, mesh.get_group().group_name)


def linear_of_shards(product: Callable[[Tensor, Tensor], Tensor], input: Any, weight: DTensor, bias: Any) -> DTensor:
    """Computes a linear layer whose weight is split over tensor-parallel ranks.

    Args:
        product: multiplies local tensors. input: a DTensor ``[..., in]``: whole for a weight that is split by outputs,
        otherwise split in its last dimension. bias: a DTensor, or None.
    """
    by_output = weight.placements[0] == Shard(OUT)
    passed = [Partial()] if by_output else input.placements
    local_result = product(input.to_local(grad_placements=passed), weight.to_local())
    result = DTensor.from_local(
        local_result, weight.device_mesh, [Shard(local_result.ndim - 1) if by_output else Partial()]
    )
    if bias is None:
        return result
    return result + bias
