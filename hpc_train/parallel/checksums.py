"""Computes checksums of what a training pass computes on a rank, before any reduction, without copies of it.

Autograd passes each local gradient to a hook of its leaf: an ordinary parameter, a DTensor under tensor parallelism, or
the gathered parameter under ZeRO. Schedules that split the backward pass of a pipeline run these hooks, too. The
checksums are added to a vector on the device, and the host does not wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from hpc_train.models.model import canonical_name
from hpc_train.parallel.fsdp import gathered_parameters
from hpc_train.parallel.precision.masters import local_part
from hpc_train.parallel.writes import BITS

_CHUNK = 1 << 20  # elements
_FACTOR = 0x1E3779B97F4A7C15  # odd, so that a product with it modulo 2^64 is 0 only for 0


@torch.no_grad()
def position_checksum(tensor: Tensor) -> Tensor:
    """Returns a sum of the bits of the local elements, weighted by their positions, modulo 2^64: an int64 scalar.

    The weights are odd and differ within a chunk, so every change of a single bit changes the result, and so does the
    exchange of two elements of up to 32 bits in a chunk.
    """
    local = local_part(tensor).detach().contiguous().reshape(-1)
    bits = local.view(BITS.get(local.itemsize, torch.int64))
    weights = (2 * torch.arange(min(_CHUNK, bits.numel()), device=bits.device) + 1) * _FACTOR
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for chunk in bits.split(_CHUNK):
        total = total * _FACTOR + (chunk.to(torch.int64) * weights[: len(chunk)]).sum()
    return total


def shard_index(tensor: Tensor) -> int:
    """Returns which of the shards of a tensor this rank holds; ranks with the same index hold the same elements."""
    if not isinstance(tensor, DTensor):
        return 0
    index = 0
    mesh = tensor.device_mesh
    coordinates = mesh.get_coordinate()
    assert coordinates is not None, "DTensors of other meshes are not held"
    for size, coordinate, placement in zip(mesh.shape, coordinates, tensor.placements, strict=True):
        if not placement.is_replicate():
            index = index * size + coordinate
    return index


def data_shards(tensor: Tensor) -> int:
    """Returns the number of shards of a tensor over the ranks of ``dp_cp``."""
    if not isinstance(tensor, DTensor):
        return 1
    axes = zip(tensor.device_mesh.mesh_dim_names or (), tensor.device_mesh.shape, tensor.placements, strict=True)
    return prod(size for name, size, placement in axes if name.startswith("dp") and not placement.is_replicate())


ARRIVED, LEFT = "what arrives at", "what leaves"  # in the forward pass
GRADIENT_ARRIVED, GRADIENT_LEFT = "the gradient that arrives at", "the gradient that leaves"


class PassChecksums:
    """Records the checksums of the passes through ``parts``, the model parts of this rank.

    Attributes:
        names: what each checksum is of: the local gradient of a parameter, by the name of the parameter, and what
            arrives at and leaves each part in the forward and the backward pass.
    """

    def __init__(self, parts: Sequence[nn.Module], device: torch.device) -> None:
        self._parts = parts
        self._device = device
        self.names: list[str] = []
        self._sums = torch.zeros(0, dtype=torch.int64, device=device)
        self._hooks = ExitStack()  # of the passes that are recorded

    @contextmanager
    def recording(self) -> Iterator[Tensor]:
        """Yields the checksums of the passes in this context, ``[len(names)]`` int64 on the device.

        Under ZeRO, a training pass must have gathered the parameters before.
        """
        leaves = dict(self._leaves())
        boundaries = [
            f"{what} part {number}"
            for number in range(len(self._parts))
            for what in (ARRIVED, LEFT, GRADIENT_ARRIVED, GRADIENT_LEFT)
        ]
        self.names = [*leaves, *boundaries]
        self._sums = torch.zeros(len(self.names), dtype=torch.int64, device=self._device)
        with ExitStack() as hooks:
            self._hooks = hooks
            for index, leaf in enumerate(leaves.values()):
                hooks.callback(leaf.register_hook(partial(self._add, index)).remove)
            for number, part in enumerate(self._parts):
                first = len(leaves) + 4 * number
                hooks.callback(part.register_forward_pre_hook(partial(self._arrives, first)).remove)
                hooks.callback(part.register_forward_hook(partial(self._leaves_part, first)).remove)
            yield self._sums

    def _leaves(self) -> Iterator[tuple[str, Tensor]]:
        for number, part in enumerate(self._parts):
            prefix = f"part {number} " if len(self._parts) > 1 else ""
            gathered = gathered_parameters(part)
            for raw_name, parameter in part.named_parameters():
                name = canonical_name(raw_name)
                if parameter.requires_grad:
                    yield prefix + name, gathered.get(name, parameter)

    def _add(self, index: int, value: Tensor) -> None:
        self._sums[index] += position_checksum(value).to(self._device)

    def _arrives(self, first: int, part: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._observe(first, first + 3, inputs)

    def _leaves_part(self, first: int, part: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
        self._observe(first + 1, first + 2, outputs)

    def _observe(self, index: int, gradient_index: int, values: Any) -> None:
        for value in tree_leaves(values):
            if isinstance(value, Tensor):
                self._add(index, value)
                if value.requires_grad:
                    # schedules of pipelines use the tensors of received activations again
                    self._hooks.callback(value.register_hook(partial(self._add, gradient_index)).remove)
