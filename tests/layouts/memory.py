"""Counts the memory that a computation keeps and allocates, tensor by tensor, without a clock or an allocator."""

from __future__ import annotations

from typing import Any

import torch
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
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
