"""Copies the tensors that a rank writes to host memory, so that training continues while they are written.

All copies are in one pinned arena of exactly their size. torch's allocator of pinned memory would round each tensor up
to a power of two (``CachingHostAllocator``) and never give it back. From a GPU the copies run on a separate stream;
only an operation that changes a tensor waits for its copy: for parameters and optimizer state, the next optimizer step.
"""

from __future__ import annotations

import mmap
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpc_train.machine.kernel_counters import free_memory
from hpc_train.units import format_bytes

HOST_SHARE = 0.9  # share of the free host memory that the copies of a save may take
ALIGNMENT = 64  # bytes, a cache line
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices of this process


@torch.no_grad()  # otherwise autograd records ``DTensor.to_local``
def local_shard(tensor: Tensor) -> Tensor:
    """Returns the part of the tensor that this rank holds."""
    if isinstance(tensor, DTensor):
        return tensor.to_local().detach()
    return tensor.detach()


class HostArena:
    """Holds one mapping of host memory, pinned for ``device`` if that is a GPU; forked processes do not inherit it.

    Args:
        cuda: the torch module of the device type, such as ``torch.cuda``.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._memory: mmap.mmap | None = None
        self._pinned: bool | None = None  # None before the attempt
        self._pinning: threading.Thread | None = None

    @property
    def size(self) -> int:
        if self._memory is None:
            return 0
        return len(self._memory)

    def reserve(self, size: int) -> None:
        """Makes the arena at least ``size`` bytes large; its old content is lost if it grows.

        Raises:
            OSError: the address space of this process is limited.
        """
        if size <= self.size:
            return
        self.release()
        rounded_size = ceil(size / mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = mmap.mmap(-1, rounded_size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_DONTFORK)  # a page shared with a child may move when this process writes to it

    def view(self, offset: int, like: Tensor) -> Tensor:
        """Returns a tensor of the shape and dtype of ``like`` at ``offset``, with a storage of exactly its size.

        A slice of one large tensor would share its storage, which DCP copies before it writes.
        """
        assert self._memory is not None, "nothing is reserved"
        if like.numel() == 0:
            return torch.empty(like.shape, dtype=like.dtype)
        flat = torch.frombuffer(self._memory, dtype=like.dtype, count=like.numel(), offset=offset)
        return flat.view(like.shape)

    def begin_pin(self) -> None:
        """Pins the memory in a thread, for which ``pin`` waits.

        At 3 to 4 GB/s, an arena of 50 GB takes 15 s. Mapping the pages takes most of that time. The thread maps them
        before it calls CUDA, because a CUDA call may block those of other threads.
        """
        if self._device.type != "cuda" or self._pinned is not None or self._pinning is not None or not self._memory:
            return
        pages = torch.frombuffer(self._memory, dtype=torch.uint8)

        def map_and_pin() -> None:
            self._cuda.set_device(self._device)
            pages.zero_()
            self._register()

        self._pinning = threading.Thread(target=map_and_pin, name="pin-checkpoint-memory", daemon=True)
        self._pinning.start()

    def pin(self) -> None:
        """Pins the memory for a GPU. If the system refuses, copies from the device are slower but correct."""
        self._end_pin()
        self._register()

    def _end_pin(self) -> None:
        if self._pinning is not None:
            self._pinning.join()
            self._pinning = None

    def _register(self) -> None:
        if self._device.type != "cuda" or self._pinned is not None or self._memory is None:
            return
        code = int(self._cuda.cudart().cudaHostRegister(self._address, self.size, _PORTABLE))
        self._pinned = code == 0
        if not self._pinned:
            warnings.warn(
                f"cannot pin {self.size} bytes of host memory for checkpoints (CUDA error {code})", stacklevel=2
            )
            self._clear_error()

    def release(self) -> None:
        """Frees the memory when no tensor refers to it. All copies into it must be complete."""
        self._end_pin()
        if self._pinned:
            self._cuda.cudart().cudaHostUnregister(self._address)
        self._pinned = None
        self._memory = None

    def _clear_error(self) -> None:
        with suppress(RuntimeError):  # clears the error of the failed call, which CUDA would report for the next kernel
            torch.zeros((), device=self._device).add_(1)

    @property
    def _address(self) -> int:
        assert self._memory is not None
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr()


class SideStream:
    """Copies tensors of ``device`` on a stream other than its current one."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._stream = cuda.Stream(device)

    def copy(self, copies: Iterable[Sequence[Tensor]]) -> Any:
        """Starts copies (target, source) after the current stream's work so far; returns the event of their end.

        The caller must keep references to the sources until then, since the allocator does not track this stream.
        """
        self._event(self._current).wait(self._stream)
        with self._cuda.stream(self._stream):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        return self._event(self._stream)

    def hold(self, copied: Any) -> None:
        """Makes later work of the current stream wait for the event ``copied``; returns at once."""
        copied.wait(self._current)

    def _event(self, stream: Any) -> Any:
        event = self._cuda.Event(blocking=True)  # a thread that waits for it sleeps
        event.record(stream)
        return event

    @property
    def _current(self) -> Any:
        return self._cuda.current_stream(self._device)


@dataclass(frozen=True)
class Snapshot:
    """Holds host copies of a rank's tensors.

    Attributes:
        hold: makes later work on the device wait for the copies, without blocking; None if they are complete.
        complete: blocks until the copies are complete, in any thread; None if they already are.
    """

    tensors: Mapping[str, Tensor]
    hold: Callable[[], None] | None = None
    complete: Callable[[], None] | None = None


class HostCopies:
    """Holds one snapshot of the tensors that this rank writes, in an arena that later saves reuse.

    Args:
        side: the stream of the copies; None copies at once.
    """

    def __init__(self, device: torch.device, side: SideStream | None = None, arena: HostArena | None = None) -> None:
        self._device = device
        self._side = side
        self._arena = HostArena(device) if arena is None else arena
        self._planned: tuple[frozenset[str], frozenset[str]] | None = None  # (all names, names that this rank writes)

    def is_planned(self, state: Mapping[str, Tensor]) -> bool:
        return self._planned is not None and self._planned[0] == state.keys()

    def plan(self, state: Iterable[str], written: Iterable[str]) -> None:
        """Records which of the tensors in ``state`` this rank writes; this holds for all states of the same names."""
        self._planned = frozenset(state), frozenset(written)

    def forget_plan(self) -> None:
        """Discards the plan after a failed save, since the tensors of the ranks may have changed."""
        self._planned = None

    def bytes_of(self, state: Mapping[str, Tensor]) -> int:
        """Returns the size of the arena for a planned state."""
        return sum(_room(local_shard(state[name])) for name in self._written(state))

    def shortage(self, state: Mapping[str, Tensor], ranks_of_node: int) -> str | None:
        """Reserves address space for ``take``; returns why the host memory of this node does not suffice, or None."""
        needed = max(0, self.bytes_of(state) - self._arena.size)
        free = free_memory()
        if needed * ranks_of_node > HOST_SHARE * free.size:
            ranks = "1 rank" if ranks_of_node == 1 else f"each of {ranks_of_node} ranks"
            return (
                f"{ranks} needs {format_bytes(needed)} of host memory for copies, "
                f"and {format_bytes(free.size)} are free within {free.bound}"
            )
        try:
            self._arena.reserve(self.bytes_of(state))
        except OSError as error:  # the address space of this process is limited
            return f"the process cannot reserve {format_bytes(needed)} of host memory: {error}"
        return None

    def begin_pin(self) -> None:
        """Pins the memory that ``shortage`` has reserved in a thread, so that the first ``take`` need not."""
        self._arena.begin_pin()

    @torch.no_grad()  # otherwise autograd records ``DTensor.to_local``
    def take(self, state: Mapping[str, Tensor], until_update: Collection[str] = ()) -> Snapshot:
        """Starts the copies of a planned state, after the last snapshot has been written.

        The current stream waits at once for the copies of all tensors that are not in ``until_update``; nothing may
        change these before ``hold`` of the snapshot has been called.
        """
        self._arena.reserve(self.bytes_of(state))
        self._arena.pin()
        places = []  # the name of each tensor that this rank writes, its place in the arena, and its local shard
        offset = 0
        for name in self._written(state):
            local = local_shard(state[name])
            places.append((name, self._arena.view(offset, local), local))
            offset += _room(local)
        tensors = {name: target for name, target, _ in places}
        if self._side is None:
            for _, target, source in places:
                target.copy_(source)
            return Snapshot(tensors)
        side = self._side
        side.hold(side.copy([copy for name, *copy in places if name not in until_update]))
        copied = side.copy([copy for name, *copy in places if name in until_update])
        return Snapshot(tensors, hold=partial(side.hold, copied), complete=copied.synchronize)

    def streamed(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns the state in host memory for a synchronous save: each tensor is copied when it is requested.

        All copies use the same memory, so that a save needs no more than the largest tensor.
        """
        return _Streamed(state, self._device, self._arena)

    def release(self) -> None:
        """Frees the memory after the last save."""
        self._arena.release()

    def _written(self, state: Mapping[str, Tensor]) -> list[str]:
        assert self._planned is not None and self.is_planned(state), "the save is not planned"
        return [name for name in state if name in self._planned[1]]


class _Streamed(Mapping[str, Tensor]):
    """Maps names to host copies; a copy is valid until the next one is requested."""

    def __init__(self, state: Mapping[str, Tensor], device: torch.device, arena: HostArena) -> None:
        self._state = state
        self._device = device
        self._arena = arena

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        local = local_shard(self._state[name])
        if local.device.type != self._device.type:
            return local
        self._arena.reserve(self._largest)
        self._arena.pin()
        return self._arena.view(0, local).copy_(local)

    @cached_property
    def _largest(self) -> int:
        return max(_room(local_shard(tensor)) for tensor in self._state.values())

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def _room(tensor: Tensor) -> int:
    return ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT
