"""Defines the interface that sums a bucket of gradients over the data-parallel ranks, and the state of compression."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Exchange(Protocol):
    """Sums buckets of gradients over the ranks of one group."""

    def run(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> Iterator[dist.Work]:
        """Starts collectives and yields each before it needs the result; at the end ``gradients`` hold the sum.

        All ranks process the same buckets in the same order, so the order of all collectives is the same.

        Args:
            parameters: the parameters of the bucket, which have one dtype.
            gradients: the gradients of this rank, which are changed in place.
        """

    def commit(self, finite: Tensor) -> None:
        """Updates the state for the next step if ``finite``, a scalar bool. Call it after the reduction."""

    def local_state(self, parameter: nn.Parameter) -> Mapping[str, Tensor]:
        """Returns the state for ``parameter`` that differs between ranks, in the shape of the parameter."""

    def shared_state(self, parameter: nn.Parameter) -> Mapping[str, Tensor]:
        """Returns the state for ``parameter`` that is the same on all ranks of the group."""


class Stateless:
    """An exchange without state."""

    def commit(self, finite: Tensor) -> None:
        pass

    def local_state(self, parameter: nn.Parameter) -> Mapping[str, Tensor]:
        return {}

    def shared_state(self, parameter: nn.Parameter) -> Mapping[str, Tensor]:
        return {}


class Dense(Stateless):
    """Sums a bucket with one all-reduce of a flat copy, in ``dtype`` if given."""

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype | None = None) -> None:
        self._group, self._dtype = group, dtype

    def run(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> Iterator[dist.Work]:
        """See ``Exchange.run``."""
        alone = len(gradients) == 1 and gradients[0].is_contiguous() and self._dtype is None
        flat = gradients[0] if alone else flatten(gradients)
        if self._dtype is not None:
            flat = flat.to(self._dtype)
        yield dist.all_reduce(flat, group=self._group, async_op=True)
        if not alone:
            unflatten(flat, gradients)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Returns a concatenated copy of all tensors, ``[elements]``."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copies the pieces of ``flat`` into ``tensors``."""
    pieces = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_([*tensors], [p.view_as(t) for p, t in zip(pieces, tensors, strict=True)])


class PendingState:
    """Holds one tensor per parameter; ``commit`` applies the values of a step only if the step is not skipped."""

    def __init__(self, tensors: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        self._values = dict(tensors)
        self._pending: dict[nn.Parameter, Tensor] = {}

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._values

    def __getitem__(self, parameter: nn.Parameter) -> Tensor:
        return self._values[parameter]

    def set_next(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Sets the value after this step; ``value`` is not copied."""
        self._pending[parameter] = value.view_as(self._values[parameter])

    def commit(self, finite: Tensor) -> None:
        """Applies the values of the step if ``finite``, a scalar bool on the device."""
        for parameter, value in self._pending.items():
            held = self._values[parameter]
            held.copy_(torch.where(finite, value, held))
        self._pending.clear()


def zeros(parameters: Iterable[nn.Parameter]) -> PendingState:
    return PendingState((p, torch.zeros(p.shape, dtype=p.dtype, device=p.device)) for p in parameters)
