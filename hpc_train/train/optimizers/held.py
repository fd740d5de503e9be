"""Pairs each parameter with the tensor that the optimizer of a rank updates.

``LocalShard`` is for elementwise optimizers: each rank updates its shard. ``WholeTensor`` is for all other optimizers,
such as Muon, whose update of an element depends on the full matrix: one of the ranks that share a parameter owns it.
The owner gathers the gradient, updates the full parameter and broadcasts it. The state is then sharded by parameter
instead of by row, has the shapes that the optimizer gives it, and is the same under every layout.

``MasterShard`` is for weights in bf16: the optimizer updates this rank's shard of their fp32 masters.

With offload (ZeRO-Offload: Ren et al. 2021, arXiv:2101.06840), the tensor is in host memory: gradients are copied to
the host, and the new values are copied back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hpc_train.parallel.precision.masters import keep_master, like_shard, local_part, master_of


class Held(Protocol):
    """Pairs a parameter with the tensor that the optimizer of this rank updates. All methods except ``as_saved`` may be
    collective."""

    @property
    def parameter(self) -> nn.Parameter:
        """Returns the parameter of the engine."""

    @property
    def local(self) -> nn.Parameter | None:
        """Returns the tensor that the optimizer updates; None if another rank owns the parameter."""

    def refresh(self) -> None:
        """Updates ``local`` and its gradient before an update."""

    def write_back(self) -> None:
        """Copies the updated value of ``local`` to the parameter."""

    def fetch(self) -> None:
        """Copies a value that was loaded into the parameter to ``local``."""

    def as_saved(self, value: Tensor) -> Tensor:
        """Returns a tensor of the state in the form in which a checkpoint stores it."""


def hold(parameters: Mapping[str, nn.Parameter], elementwise: Mapping[str, bool], offload: bool) -> dict[str, Held]:
    """Returns name -> the pair of a parameter and the tensor that the optimizer updates.

    Args:
        parameters: name -> trained parameter of this rank.
        elementwise: name -> whether the optimizer of the parameter is elementwise.
        offload: whether the tensors that the optimizer updates are in host memory.
    """
    elements: dict[Place, dict[Place, int]] = {}  # sizes of the mesh -> rank -> elements that it owns
    held: dict[str, Held] = {}
    for name, parameter in parameters.items():
        dims = _sharded_dims(parameter)
        if elementwise[name] or not dims:
            held[name] = local_shard(parameter, offload)
            continue
        # of the ranks that share the parameter, the one with the fewest elements owns it; all ranks compute the same
        assert isinstance(parameter, DTensor)
        sizes = tuple(parameter.device_mesh.size(dim) for dim in dims)
        places = product(*map(range, sizes))
        of_places = elements.setdefault(sizes, dict.fromkeys(places, 0))
        owner = min(of_places, key=of_places.__getitem__)
        of_places[owner] += parameter.numel()
        held[name] = WholeTensor.of(parameter, owner, offload)
    return held


@dataclass(frozen=True)
class LocalShard:
    """Holds as ``local`` the parameter itself, its local shard, or a copy of the shard on the host."""

    parameter: nn.Parameter
    local: nn.Parameter
    offloaded: bool

    def refresh(self) -> None:
        """Updates the tensors, since FSDP2 may replace the memory of a shard and creates new gradients."""
        gradient = self.parameter.grad
        if gradient is not None:
            gradient = local_part(gradient)
        if self.offloaded:
            _copy_gradient(self.local, gradient)
        elif self.local is not self.parameter:
            self.local.data = local_part(self.parameter)
            self.local.grad = gradient

    def write_back(self) -> None:
        if self.offloaded:
            local_part(self.parameter.detach()).copy_(self.local, non_blocking=True)
        elif self.local is not self.parameter:
            self.local.grad = None  # otherwise the engine could not free it before the next step

    def fetch(self) -> None:
        if self.offloaded:
            self.local.data.copy_(local_part(self.parameter.detach()))

    def as_saved(self, value: Tensor) -> Tensor:
        return like_shard(value, self.parameter)


def local_shard(parameter: nn.Parameter, offload: bool) -> Held:
    master_parameter = master_of(parameter)
    if master_parameter is not None:
        master = local_part(master_parameter)
        if offload:
            master = _on_host(master).copy_(master)
            keep_master(parameter, master)  # frees the master on the device
        return MasterShard(parameter, nn.Parameter(master), offload)
    local = local_part(parameter.detach())
    if offload:
        return LocalShard(parameter, nn.Parameter(_on_host(local).copy_(local)), True)
    if isinstance(parameter, DTensor):
        return LocalShard(parameter, nn.Parameter(local), False)
    return LocalShard(parameter, parameter, False)


@dataclass(frozen=True)
class MasterShard(LocalShard):
    """Holds as ``local`` the fp32 master of a shard in bf16, on the device or on the host."""

    def refresh(self) -> None:
        if self.offloaded:
            super().refresh()
            return
        gradient = self.parameter.grad
        self.local.grad = None if gradient is None else local_part(gradient).to(self.local.dtype)

    def write_back(self) -> None:
        local_part(self.parameter.detach()).copy_(self.local, non_blocking=True)
        if not self.offloaded:
            self.local.grad = None  # a copy that only the update needs

    def fetch(self) -> None:
        """Does nothing, since a load writes into the master itself."""


def _copy_gradient(local: nn.Parameter, gradient: Tensor | None) -> None:
    """Copies a gradient to the host."""
    if gradient is None:
        local.grad = None
        return
    if local.grad is None:
        local.grad = _on_host(gradient, local.dtype)
    local.grad.copy_(gradient, non_blocking=True)


def _on_host(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(like.shape, dtype=dtype or like.dtype, device="cpu", pin_memory=like.is_cuda)


Place = tuple[int, ...]  # one coordinate for each dimension of the mesh over which a parameter is sharded


@dataclass(frozen=True)
class WholeTensor:
    """``local`` is the full parameter on its ``owner`` and None on other ranks."""

    parameter: nn.Parameter
    owner: Place
    local: nn.Parameter | None
    offloaded: bool

    @classmethod
    def of(cls, parameter: nn.Parameter, owner: Place, offload: bool) -> WholeTensor:
        """Creates the pair. Collective over the ranks that share the parameter."""
        whole = _gathered(parameter.detach(), parameter)
        if _own_place(parameter) != owner:
            return cls(parameter, owner, None, offload)
        if offload:
            whole = _on_host(whole).copy_(whole)
        return cls(parameter, owner, nn.Parameter(whole), offload)

    def refresh(self) -> None:
        gradient = self.parameter.grad
        if gradient is not None:
            gradient = _gathered(gradient, self.parameter)
        if self.local is None:
            return
        if self.offloaded:
            _copy_gradient(self.local, gradient)
        else:
            self.local.grad = gradient

    def write_back(self) -> None:
        if self.parameter.grad is None:
            return
        shard = local_part(self.parameter.detach())
        if self.local is None:
            whole = torch.empty(self.parameter.shape, dtype=shard.dtype, device=shard.device)
        else:
            whole = self.local.detach().to(shard.device).contiguous()
        parameter = self.parameter
        assert isinstance(parameter, DTensor)
        place = _own_place(parameter)
        dims = _sharded_dims(parameter)
        for index in reversed(range(len(dims))):  # from the owner to all ranks, one dimension of the mesh at a time
            if place[:index] == self.owner[:index]:
                group = parameter.device_mesh.get_group(dims[index])
                dist.broadcast(whole, group=group, group_src=self.owner[index])
        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
            whole = whole.narrow(dim, start if length else 0, length)
        shard.copy_(whole)
        if self.local is not None and not self.offloaded:
            self.local.grad = None  # a full gradient, which would stay in memory until the next step

    def fetch(self) -> None:
        whole = _gathered(self.parameter.detach(), self.parameter)
        if self.local is not None:
            self.local.data.copy_(whole)

    def as_saved(self, value: Tensor) -> Tensor:
        return value.detach()


def _sharded_dims(parameter: Tensor) -> list[int]:
    """Returns the dimensions of the mesh over which a parameter is sharded; empty if each rank has the full
    parameter."""
    if not isinstance(parameter, DTensor):
        return []
    mesh = parameter.device_mesh  # is_shard() is false for a strided shard (ZeRO over tensor parallelism)
    return [dim for dim, kind in enumerate(parameter.placements) if not kind.is_replicate() and mesh.size(dim) > 1]


def _own_place(parameter: nn.Parameter) -> Place:
    assert isinstance(parameter, DTensor)
    return tuple(parameter.device_mesh.get_local_rank(dim) for dim in _sharded_dims(parameter))


def _gathered(tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    """Returns the full tensor of a tensor that is sharded like ``parameter``. Collective."""
    sharded = like_shard(local_part(tensor), parameter)
    assert isinstance(sharded, DTensor)
    whole = sharded.full_tensor()
    if whole.untyped_storage().data_ptr() == local_part(tensor).untyped_storage().data_ptr():
        return whole.clone()
    return whole
