"""Keeps what layers save for the backward pass in host memory (``train.activation_offload``).

Each layer runs under ``torch.autograd.graph.saved_tensors_hooks``. A storage that is large enough is copied once to
pinned host memory, however many views of it autograd saves, on a side stream while the layer continues. The copies of a
layer must be complete when the next one ends, so the device holds the activations of two layers at most. In the
backward pass the first tensor that a layer needs brings back the whole layer, if the one above has not done so, and
begins to bring back the one below, so that transfers and computation overlap (Rhu et al. 2016, vDNN, arXiv:1602.08124).
Where a schedule splits the backward pass, what came back for its first part stays on the device until its second part.

Weights and their views stay where they are, since nothing would be freed. The same holds for the casts that a step
keeps (``precision/dtypes.py``), for the casts of autocast where a module overrides forward, and for the last layer of a
model, whose backward pass comes next. Under activation checkpointing the inputs of a layer are what autograd saves; the
products that ``ops`` keeps belong to torch's checkpointing and stay on the device.

On the CPU the same code copies synchronously between two places of host memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from hpc_train.errors import UserError
from hpc_train.models.model import Model
from hpc_train.models.wrapped import layers_of
from hpc_train.parallel.precision.dtypes import kept_by


def offload_activations(model: nn.Module, least_bytes: int, device: torch.device) -> None:
    """Makes the layers or blocks of ``model`` (whole or a stage) offload what they save, in place.

    Call it after activation checkpointing and compilation are applied and before the model is sharded.

    Args:
        least_bytes: the size from which a storage is copied.

    Raises:
        UserError: the model has neither ``layers`` nor blocks.
    """
    layers = layers_of(model)
    if not layers and not isinstance(model, Model):  # a stage may have no layer of the model
        raise UserError(
            "activation offload wraps the layers of the model, but no repeated blocks were found in this model",
            where="train.activation_offload",
            fix="use none, or name the classes of the blocks: model.wrap=[Block]",
        )
    ends = not isinstance(model, Model) or model.head is not None
    offload = _Offload(least_bytes, device)
    for position, layer in enumerate(layers):
        stays = ends and position == len(layers) - 1
        saving = partial(offload.layer, layer, position == 0, stays)
        if layer._compiled_call_impl is not None:  # a compiled graph does not contain the context
            layer._compiled_call_impl = partial(_run, layer._compiled_call_impl, saving)
        else:
            layer.forward = partial(_run, layer.forward, saving)  # type: ignore[method-assign]


def _run(
    forward: Callable[..., Any], saving: Callable[[], AbstractContextManager[None]], *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    with saving():
        return forward(*args, **kwargs)


class _Transfers:
    """Copies bytes between ``device`` and host memory, on a GPU with a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side: torch.cuda.Stream | None = None  # created at the first copy, on the device of the rank

    @property
    def asynchronous(self) -> bool:
        return self.device.type == "cuda"

    def to_host(self, flat: Tensor) -> Tensor:
        """Begins a copy of ``flat``, which must live until a wait for ``mark``."""
        host = host_buffer(len(flat), pinned=self.asynchronous)
        with self._on_side_stream():
            host.copy_(flat, non_blocking=True)
        return host

    def to_device(self, hosts: Sequence[Tensor]) -> list[Tensor]:
        """Begins copies of ``hosts``, which are complete after a wait for ``mark``."""
        flats = [torch.empty(len(host), dtype=torch.uint8, device=self.device) for host in hosts]
        with self._on_side_stream():
            for flat, host in zip(flats, hosts, strict=True):
                flat.copy_(host, non_blocking=True)
        return flats

    def mark(self) -> torch.cuda.Event | None:
        """Returns an event after all copies that have begun; None if they are complete."""
        if self._side is not None:
            return self._side.record_event()
        return None

    def wait_for(self, event: torch.cuda.Event | None) -> None:
        """Makes the current stream wait for ``event``; the host does not wait."""
        if event is not None:
            event.wait(torch.cuda.current_stream(self.device))  # Stream.wait_event is counted as communication

    @contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        """Runs copies on the side stream, after what the current stream has begun."""
        if not self.asynchronous:
            yield
            return
        if self._side is None:
            self._side = torch.cuda.Stream(self.device)
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            yield


def host_buffer(size: int, pinned: bool) -> Tensor:
    """Returns ``size`` bytes of host memory; torch keeps freed pinned memory for the next buffer of a similar size."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)


@dataclass(eq=False)
class _Copy:
    """Holds the copy of one storage. Its memory is freed with the last saved tensor that refers to it.

    Attributes:
        host: the bytes in host memory, until they are on the way back.
        flat: the bytes on the device, complete after ``arrival``.
    """

    host: Tensor | None
    flat: Tensor | None = None
    arrival: torch.cuda.Event | None = None


class _SavedLayer:
    """Holds weak references to the copies that one forward pass of a layer has saved; autograd owns them.

    Attributes:
        below: the layer before, whose backward pass comes after that of this one.
        sources: storages on the device whose copies may not be complete.
    """

    def __init__(self, transfers: _Transfers, below: _SavedLayer | None) -> None:
        self.below = below
        self.sources: list[Tensor] = []
        self._transfers = transfers
        self._copies = weakref.WeakKeyDictionary[_Copy, None]()  # each once, however many tensors are views of it
        self._reached = False

    def add(self, copy: _Copy) -> None:
        self._copies[copy] = None

    def reach(self) -> None:
        """Brings back this layer and begins with the one below, when the backward pass reaches the layer.

        The current stream waits for all of the layer, also for what its backward pass does not use.
        """
        if self._reached:
            return
        self._reached = True
        self.fetch()
        for arrival in {copy.arrival for copy in self._copies}:
            self._transfers.wait_for(arrival)
        if self.below is not None:
            self.below.fetch()
            self.below = None

    def fetch(self) -> None:
        """Begins to bring back the storages that are in host memory.

        The memory on the device must live until ``reach`` has waited for its arrival: the current stream would use it
        again while the copy is written there.
        """
        away = [copy for copy in self._copies if copy.host is not None]
        if not away:
            return
        flats = self._transfers.to_device([copy.host for copy in away if copy.host is not None])
        arrival = self._transfers.mark()
        for copy, flat in zip(away, flats, strict=True):
            copy.flat = flat
            copy.arrival = arrival
            copy.host = None  # torch does not use pinned memory again before the copy is complete


@dataclass(frozen=True)
class _Kept:
    """Stands in autograd for a tensor that stays on the device."""

    layer: _SavedLayer
    tensor: Tensor

    def restore(self) -> Tensor:
        self.layer.reach()
        return self.tensor


@dataclass(frozen=True)
class _View:
    """Stands in autograd for another tensor: a copy of its storage, its place there, and a DTensor's spec."""

    layer: _SavedLayer
    copy: _Copy
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    spec: Any

    def restore(self) -> Tensor:
        self.layer.reach()
        flat = self.copy.flat
        assert flat is not None
        local = torch.empty(0, dtype=self.dtype, device=flat.device)
        local.set_(flat.untyped_storage(), self.offset, self.size, self.stride)
        if self.spec is None:
            return local
        return DTensor(local, self.spec, requires_grad=False)


class _Weights:
    """The storages of a layer's weights and of the casts that the step keeps.

    They are those at the time when the layer saves its first tensor: ZeRO has gathered them.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._storages: set[int] | None = None

    def have(self, storage: torch.UntypedStorage) -> bool:
        if self._storages is None:
            self._storages = {
                _local(tensor).untyped_storage()._cdata for tensor in (*self._layer.parameters(), *kept_by(self._layer))
            }
        return storage._cdata in self._storages


class _Offload:
    """Offloads what the layers of one model or stage save.

    Args:
        least_bytes: the size from which a storage is copied.
    """

    def __init__(self, least_bytes: int, device: torch.device) -> None:
        self._least = least_bytes
        self._device = device
        self._transfers = _Transfers(device)
        self._layer: _SavedLayer | None = None  # the newest one
        self._copied: torch.cuda.Event | None = None  # after its copies
        self._known: dict[tuple[int, int], tuple[StorageWeakRef, weakref.ref[_Copy]]] = {}

    @contextmanager
    def layer(self, module: nn.Module, first: bool, stays: bool) -> Iterator[None]:
        """Runs the forward pass of a layer, whose saved tensors stay on the device if ``stays``."""
        before = self._layer
        if first:
            self._known.clear()
        saved = _SavedLayer(self._transfers, None if first else before)
        pack = partial(_Kept, saved) if stays else partial(self._pack, saved, _Weights(module))
        with saved_tensors_hooks(pack, _unpack):
            yield
        if before is not None and before.sources:
            self._transfers.wait_for(self._copied)
            before.sources.clear()  # what the current stream begins after the wait may use the memory again
        self._layer = saved
        self._copied = self._transfers.mark()

    @torch.no_grad()
    def _pack(self, saved: _SavedLayer, weights: _Weights, tensor: Tensor) -> _Kept | _View:
        local = _local(tensor)
        if type(local) is not Tensor or local.device.type != self._device.type or local.is_sparse:
            return _Kept(saved, tensor)
        storage = local.untyped_storage()
        if storage.nbytes() < self._least or weights.have(storage) or _is_cast_weight(tensor):
            return _Kept(saved, tensor)
        copy = self._copy_of(storage, local._version, saved)
        saved.add(copy)
        spec = tensor._spec if isinstance(tensor, DTensor) else None
        return _View(saved, copy, local.dtype, local.size(), local.stride(), int(local.storage_offset()), spec)

    def _copy_of(self, storage: torch.UntypedStorage, version: int, saved: _SavedLayer) -> _Copy:
        """Returns the copy of ``storage`` in this state, which another saved tensor may have made."""
        key = storage._cdata, version
        if key in self._known:
            reference, weak_copy = self._known[key]
            copy = weak_copy()
            if copy is not None and not reference.expired():
                return copy
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        copy = _Copy(self._transfers.to_host(flat))
        if self._transfers.asynchronous:
            saved.sources.append(flat)
        self._known[key] = StorageWeakRef(storage), weakref.ref(copy)
        return copy


@torch.no_grad()
def _unpack(packed: _Kept | _View) -> Tensor:
    return packed.restore()


def _local(tensor: Tensor) -> Tensor:
    """Returns the part of a DTensor that this rank holds, complete; other tensors unchanged."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if isinstance(local, AsyncCollectiveTensor):
        return local.trigger_wait()
    return local


def _is_cast_weight(tensor: Tensor) -> bool:
    """Returns whether ``tensor`` is, or is a view of, a weight in autocast's dtype, which autocast keeps anyway."""
    made_by = (tensor if tensor._base is None else tensor._base).grad_fn
    if made_by is None or made_by.name() != "ToCopyBackward0":
        return False
    return any(isinstance(getattr(node, "variable", None), nn.Parameter) for node, _ in made_by.next_functions)
