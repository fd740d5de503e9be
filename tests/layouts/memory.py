"""Counts the memory that a computation keeps and allocates, tensor by tensor, without a clock or an allocator."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Observes every tensor that an operator creates inside the block, in forward and backward.

    Attributes:
        largest: the number of elements of the largest of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, tuple[StorageWeakRef, int]] = {}
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in _tensors(args)}
        for tensor in _tensors(made):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:  # the tensor is not a view
                self._sizes[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.largest = max(self.largest, storage.nbytes() // tensor.element_size())
        return made

    @property
    def alive(self) -> int:
        """Returns the number of bytes of the created tensors that still exist."""
        return sum(size for reference, size in self._sizes.values() if not reference.expired())


def _tensors(values: Any) -> list[torch.Tensor]:
    found = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    return [value._local_tensor if isinstance(value, DTensor) else value for value in found]  # a DTensor has no memory


class PeakMemory(Allocations):
    """Also observes the peak.

    Attributes:
        peak: the largest number of bytes that the created tensors held at the same time, with the size that each
            storage had then: FSDP frees and fills the storages of gathered parameters without creating tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        self.peak = max(self.peak, self.held)
        return made

    @property
    def held(self) -> int:
        """Returns the bytes that the created tensors hold now, without those on ``meta``."""
        self._sizes = {key: known for key, known in self._sizes.items() if not known[0].expired()}
        alive = (torch.UntypedStorage._new_with_weak_ptr(reference.cdata) for reference, _ in self._sizes.values())
        return sum(storage.nbytes() for storage in alive if storage is not None and storage.device.type != "meta")
