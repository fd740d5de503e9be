"""Pairs each parameter with the tensor that the optimizer of a rank updates.

``LocalShard`` is for elementwise optimizers: each rank updates its shard. ``WholeTensor`` is for all other optimizers,
such as Muon, whose update of an element depends on the full matrix: one of the ranks that share a parameter owns it.
The owner receives the shards of the gradient, updates the full parameter and sends the shards of the result back
(``WholeTensors``). Over n ranks, each receives about 2/n values per parameter and step. The state is then sharded by
parameter instead of by row, has the shapes that the optimizer gives it, and is the same under every layout.

``MasterShard`` is for weights in bf16: the optimizer updates this rank's shard of their fp32 masters.

With offload (ZeRO-Offload: Ren et al. 2021, arXiv:2101.06840), the tensor is in host memory: gradients are copied to
the host, and the new values are copied back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import compress, product
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from hpc_train.parallel.precision.masters import keep_master, like_shard, local_part, master_of

MOST_ELEMENTS = 2**26  # of a group that is updated together: 256 MiB of gradients in fp32


class Held(Protocol):
    """Pairs a parameter with the tensor that the optimizer of this rank updates."""

    @property
    def parameter(self) -> nn.Parameter:
        """Returns the parameter of the engine."""

    @property
    def local(self) -> nn.Parameter | None:
        """Returns the tensor that the optimizer updates; None if another rank owns the parameter."""

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
        local = None
        if _place_of_rank(parameter) == owner:
            whole = local_part(parameter.detach()).new_empty(parameter.shape)
            if offload:
                whole = empty_on_host(whole)
            local = nn.Parameter(whole)  # WholeTensors.fetch sets the values
        held[name] = WholeTensor(parameter, owner, local, offload)
    return held


class HostCopy:
    """Copies ``tensors`` from the device to ``hosts``. The host waits only in ``wait``, and only for these copies."""

    def __init__(self, hosts: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        self._done: torch.cuda.Event | None = None
        for host, tensor in zip(hosts, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if device is not None:
            self._done = torch.cuda.current_stream(device).record_event()

    def wait(self) -> None:
        if self._done is not None:
            self._done.synchronize()


class HostFlag:
    """Reads ``flag``, a bool scalar on the device, on the host. The host does not wait before ``value``."""

    def __init__(self, flag: Tensor) -> None:
        self._host = empty_on_host(flag)
        self._copy = HostCopy([self._host], [flag])

    @property
    def value(self) -> bool:
        self._copy.wait()
        return bool(self._host)


@dataclass(frozen=True)
class LocalShard:
    """Holds as ``local`` the parameter itself, its local shard, or a copy of the shard on the host."""

    parameter: nn.Parameter
    local: nn.Parameter
    offloaded: bool

    def refresh(self) -> None:
        """Updates the tensors, since FSDP2 may replace the memory of a shard and creates new gradients."""
        if self.local is not self.parameter:
            gradient = self.parameter.grad
            if gradient is not None:
                gradient = local_part(gradient)
            self.local.data = local_part(self.parameter)
            self.local.grad = gradient

    def write_back(self) -> None:
        """Copies the updated value of ``local`` to the parameter."""
        if self.offloaded:
            local_part(self.parameter.detach()).copy_(self.local, non_blocking=True)
        elif self.local is not self.parameter:
            self.local.grad = None  # otherwise the engine could not free it before the next step

    def fetch(self) -> None:
        """Copies a value that was loaded into the parameter to ``local``."""
        if self.offloaded:
            self.local.data.copy_(local_part(self.parameter.detach()))

    def as_saved(self, value: Tensor) -> Tensor:
        return like_shard(value, self.parameter)


def local_shard(parameter: nn.Parameter, offload: bool) -> LocalShard:
    master_parameter = master_of(parameter)
    if master_parameter is not None:
        master = local_part(master_parameter)
        if offload:
            master = empty_on_host(master).copy_(master)
            keep_master(parameter, master)  # frees the master on the device
        return MasterShard(parameter, nn.Parameter(master), offload)
    local = local_part(parameter.detach())
    if offload:
        return LocalShard(parameter, nn.Parameter(empty_on_host(local).copy_(local)), True)
    if isinstance(parameter, DTensor):
        return LocalShard(parameter, nn.Parameter(local), False)
    return LocalShard(parameter, parameter, False)


@dataclass(frozen=True)
class MasterShard(LocalShard):
    """Holds as ``local`` the fp32 master of a shard in bf16, on the device or on the host."""

    def refresh(self) -> None:
        gradient = self.parameter.grad
        self.local.grad = None if gradient is None else local_part(gradient).to(self.local.dtype)

    def write_back(self) -> None:
        local_part(self.parameter.detach()).copy_(self.local, non_blocking=True)
        if not self.offloaded:
            self.local.grad = None  # a copy that only the update needs

    def fetch(self) -> None:
        """Does nothing, since a load writes into the master itself."""


def _to_host(gradients: Mapping[nn.Parameter, Tensor]) -> HostCopy:
    """Starts to copy the gradients of parameters that are in host memory."""
    hosts = []
    for parameter, gradient in gradients.items():
        if parameter.grad is None:
            parameter.grad = empty_on_host(gradient, parameter.dtype)
        hosts.append(parameter.grad)
    return HostCopy(hosts, [*gradients.values()])


def empty_on_host(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(like.shape, dtype=dtype or like.dtype, device="cpu", pin_memory=like.is_cuda)


Place = tuple[int, ...]  # one coordinate for each dimension of the mesh over which a parameter is sharded


@dataclass(frozen=True)
class WholeTensor:
    """``local`` is the full parameter on its ``owner`` and None on other ranks."""

    parameter: nn.Parameter
    owner: Place
    local: nn.Parameter | None
    offloaded: bool

    def as_saved(self, value: Tensor) -> Tensor:
        return value.detach()


class Group(Protocol):
    """Parameters that are updated together. All methods may be collective over the ranks that share parameters.

    ``begin`` starts the transfer of the gradients, so that they arrive while the group before is updated.
    """

    @property
    def members(self) -> Sequence[Held]:
        """Returns the pairs of the group."""

    def begin(self) -> None:
        """Starts to move the gradients."""

    def refresh(self) -> None:
        """Waits for the gradients, and updates ``local`` and its gradient before an update."""

    def write_back(self) -> None:
        """Starts to copy the updated values of ``local`` to the parameters."""

    def finish(self) -> None:
        """Waits for what ``write_back`` has started."""

    def fetch(self) -> None:
        """Copies values that were loaded into the parameters to ``local``."""


def groups_of(held: Iterable[Held], limited: Iterable[bool]) -> list[Group]:
    """Returns the groups in the order of their updates, which is the same on all ranks that share parameters.

    Args:
        limited: for each pair, whether its update needs temporary memory. A group of such pairs, and of whole tensors
            for each owner, has at most ``MOST_ELEMENTS`` elements, or one larger parameter.
    """
    shards: list[LocalShard] = []
    groups: list[Group] = []
    elements = 0
    buckets: dict[tuple[Any, ...], list[WholeTensor]] = {}  # by the ranks that share the parameters, and the dtype
    of_owners: dict[tuple[Any, ...], dict[Place, int]] = {}
    wholes: list[Group] = []
    for pair, is_limited in zip(held, limited, strict=True):
        if isinstance(pair, WholeTensor):
            key = (*(group.group_name for group in _groups(pair.parameter)), pair.parameter.dtype)
            owned = of_owners.setdefault(key, {})
            size = pair.parameter.numel()
            if owned and owned.get(pair.owner, 0) + size > MOST_ELEMENTS:
                wholes.append(WholeTensors(buckets.pop(key)))
                owned.clear()
            owned[pair.owner] = owned.get(pair.owner, 0) + size
            buckets.setdefault(key, []).append(pair)
            continue
        assert isinstance(pair, LocalShard)
        size = pair.local.numel() * is_limited
        if shards and elements + size > MOST_ELEMENTS:
            groups.append(LocalShards(shards))
            shards = []
            elements = 0
        elements += size
        shards.append(pair)
    if shards:
        groups.append(LocalShards(shards))
    return [*groups, *wholes, *(WholeTensors(bucket) for bucket in buckets.values())]


class LocalShards:
    """Shards that are updated together. With offload, their gradients are copied to the host."""

    def __init__(self, members: Sequence[LocalShard]) -> None:
        self.members = members
        self._arriving: HostCopy | None = None

    def begin(self) -> None:
        gradients: dict[nn.Parameter, Tensor] = {}
        for held in self.members:
            gradient = held.parameter.grad
            if held.offloaded and gradient is None:
                held.local.grad = None
            elif held.offloaded and gradient is not None:
                gradients[held.local] = local_part(gradient)
        self._arriving = _to_host(gradients)

    def refresh(self) -> None:
        assert self._arriving is not None
        self._arriving.wait()
        self._arriving = None
        for held in self.members:
            if not held.offloaded:
                held.refresh()

    def write_back(self) -> None:
        for held in self.members:
            held.write_back()

    def finish(self) -> None:
        """Does nothing: the copies are in the order of the stream."""

    def fetch(self) -> None:
        for held in self.members:
            held.fetch()


Piece = tuple[int, Place]  # the shard of a member that the rank at a place holds


@dataclass(frozen=True)
class _Route:
    """The shards that travel between this rank and each rank of ``group``, to their owners.

    Attributes:
        sent, received: for each rank, the shards that this rank sends to it and receives from it, with their elements.
    """

    group: dist.ProcessGroup
    sent: Sequence[Mapping[Piece, int]]
    received: Sequence[Mapping[Piece, int]]

    def back(self) -> _Route:
        """Returns the route from the owners."""
        return _Route(self.group, self.received, self.sent)


class _Transfer:
    """Sends shards over ``routes``, one after another. The first one begins at once, and overlaps with what the rank
    computes until ``wait``.

    Args:
        pieces: the shards that this rank sends over the first route.
        empty: a tensor without elements, on the device and in the dtype of the shards.
    """

    def __init__(self, routes: Sequence[_Route], pieces: Mapping[Piece, Tensor], empty: Tensor) -> None:
        self._routes = routes
        self._empty = empty
        self._begin(pieces)

    def _begin(self, pieces: Mapping[Piece, Tensor]) -> None:
        route = self._routes[0]
        sent = torch.cat([self._empty, *(pieces[piece].reshape(-1) for of_rank in route.sent for piece in of_rank)])
        sent_sizes = [sum(of_rank.values()) for of_rank in route.sent]
        received_sizes = [sum(of_rank.values()) for of_rank in route.received]
        self._received = self._empty.new_empty(sum(received_sizes))
        work = dist.all_to_all_single(
            self._received, sent, received_sizes, sent_sizes, group=route.group, async_op=True
        )
        assert work is not None
        self._work = work

    def wait(self) -> dict[Piece, Tensor]:
        """Returns the shards that have arrived, flat. On a GPU only the stream waits."""
        self._work.wait()
        sizes = {piece: size for of_rank in self._routes[0].received for piece, size in of_rank.items()}
        pieces = dict(zip(sizes, self._received.split([*sizes.values()]), strict=True))
        self._routes = self._routes[1:]
        if not self._routes:
            return pieces
        self._begin(pieces)
        return self.wait()


class WholeTensors:
    """Whole tensors of the same ranks and dtype, whose shards travel together: in one all-to-all to the owners and in
    one back, for each dimension of the mesh over which they are sharded.

    Args:
        members: the pairs, in the same order on all ranks that share them.
    """

    def __init__(self, members: Sequence[WholeTensor]) -> None:
        self.members = members
        self._place = _place_of_rank(members[0].parameter)
        self._regions = [_regions_of(held.parameter) for held in members]
        self._owned = [number for number, held in enumerate(members) if held.local is not None]
        self._routes = [*map(self._route, range(len(self._place)))]
        self._gradients: _Transfer | None = None
        self._values: _Transfer | None = None

    def begin(self) -> None:
        shards = []
        for held in self.members:
            gradient = held.parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(held.parameter)
            shards.append(local_part(gradient))
        self._gradients = self._to_owners(shards)

    def refresh(self) -> None:
        assert self._gradients is not None
        pieces = self._gradients.wait()
        self._gradients = None
        gradients: dict[nn.Parameter, Tensor] = {}
        for number in self._owned:
            held = self.members[number]
            assert held.local is not None
            if held.parameter.grad is None:
                held.local.grad = None
            elif held.offloaded:
                gradients[held.local] = self._assembled(number, pieces)
            else:
                held.local.grad = self._assembled(number, pieces)
        _to_host(gradients).wait()

    def write_back(self) -> None:
        pieces: dict[Piece, Tensor] = {}
        for number in self._owned:
            held = self.members[number]
            assert held.local is not None
            whole = held.local.detach().to(local_part(held.parameter).device, non_blocking=True)
            for place, region in self._regions[number].items():
                pieces[number, place] = whole[region]
            if not held.offloaded:
                held.local.grad = None  # a full gradient, which would stay in memory until the next step
        self._values = _Transfer([route.back() for route in self._routes], pieces, self._nothing())

    def finish(self) -> None:
        if self._values is None:
            return
        pieces = self._values.wait()
        self._values = None
        shards = [local_part(held.parameter.detach()) for held in self.members]
        received = [pieces[number, self._place].view(shard.shape) for number, shard in enumerate(shards)]
        torch._foreach_copy_(shards, received)

    def fetch(self) -> None:
        pieces = self._to_owners([local_part(held.parameter.detach()) for held in self.members]).wait()
        for number in self._owned:
            local = self.members[number].local
            assert local is not None
            local.data.copy_(self._assembled(number, pieces))

    def _to_owners(self, shards: Sequence[Tensor]) -> _Transfer:
        pieces = {(number, self._place): shard for number, shard in enumerate(shards)}
        return _Transfer([*reversed(self._routes)], pieces, self._nothing())

    def _nothing(self) -> Tensor:
        return local_part(self.members[0].parameter.detach()).new_empty(0)

    def _assembled(self, number: int, pieces: Mapping[Piece, Tensor]) -> Tensor:
        """Returns the full tensor of a member that this rank owns."""
        whole = self._nothing().new_empty(self.members[number].parameter.shape)
        parts = [whole[region] for region in self._regions[number].values()]
        shards = [pieces[number, place] for place in self._regions[number]]
        torch._foreach_copy_(parts, [shard.view(part.shape) for part, shard in zip(parts, shards, strict=True)])
        return whole

    def _route(self, dim: int) -> _Route:
        """Returns the route over the ranks whose places differ from that of this rank in coordinate ``dim`` only.

        The shards of ranks that differ in a later coordinate have travelled before.
        """
        parameter = self.members[0].parameter
        assert isinstance(parameter, DTensor)
        dims = _sharded_dims(parameter)
        sizes = [parameter.device_mesh.size(each) for each in dims]
        behind = [*product(*map(range, sizes[dim + 1 :]))]
        sent: list[dict[Piece, int]] = [{} for _ in range(sizes[dim])]
        received: list[dict[Piece, int]] = [{} for _ in range(sizes[dim])]
        for number, held in enumerate(self.members):
            if held.owner[dim + 1 :] != self._place[dim + 1 :]:
                continue
            routes = [(self._place[dim], sent[held.owner[dim]])]
            if held.owner[dim] == self._place[dim]:
                routes += enumerate(received)
            for rank, pieces in routes:
                for places in behind:
                    place = (*self._place[:dim], rank, *places)
                    region = self._regions[number][place]
                    pieces[number, place] = prod(part.stop - part.start for part in region)
        return _Route(parameter.device_mesh.get_group(dims[dim]), sent, received)


def _sharded_dims(parameter: Tensor) -> list[int]:
    """Returns the dimensions of the mesh over which a parameter is sharded; empty if each rank has the full
    parameter."""
    if not isinstance(parameter, DTensor):
        return []
    mesh = parameter.device_mesh  # is_shard() is false for a strided shard (ZeRO over tensor parallelism)
    return [dim for dim, kind in enumerate(parameter.placements) if not kind.is_replicate() and mesh.size(dim) > 1]


def _groups(parameter: nn.Parameter) -> list[dist.ProcessGroup]:
    assert isinstance(parameter, DTensor)
    return [parameter.device_mesh.get_group(dim) for dim in _sharded_dims(parameter)]


def _place_of_rank(parameter: nn.Parameter) -> Place:
    assert isinstance(parameter, DTensor)
    return tuple(parameter.device_mesh.get_local_rank(dim) for dim in _sharded_dims(parameter))


def _regions_of(parameter: nn.Parameter) -> Mapping[Place, tuple[slice, ...]]:
    """Returns the part of the full parameter that the rank at each place holds."""
    assert isinstance(parameter, DTensor)
    return _regions(parameter.shape, parameter.device_mesh.shape, tuple(parameter.placements))


@cache  # the layers of a model have few shapes
def _regions(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Placement, ...]
) -> Mapping[Place, tuple[slice, ...]]:
    is_sharded = [not kind.is_replicate() and size > 1 for kind, size in zip(placements, mesh, strict=True)]
    regions: dict[Place, tuple[slice, ...]] = {}
    for coordinate in product(*(range(size if shards else 1) for size, shards in zip(mesh, is_sharded, strict=True))):
        lengths, offsets = _compute_local_shape_and_global_offset(shape, mesh, [*coordinate], placements)
        region = [slice(start, start + length) for start, length in zip(offsets, lengths, strict=True)]
        regions[tuple(compress(coordinate, is_sharded))] = tuple(region)
    return regions
