"""The interface that sums one bucket of gradients over the data axis, dense or compressed, and its state."""

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

        Every rank takes the same buckets the same way, so the order of all collectives is the same everywhere.

        Args:
            parameters: of the bucket, of one dtype.
            gradients: this rank's, changed in place.
        """

    def commit(self, finite: Tensor) -> None:
        """Updates the state for the next step if ``finite``, a scalar bool. Call it after the reduction."""

    def carried(self, parameter: nn.Parameter) -> Mapping[str, Tensor]:
        """Returns the state of this rank alone for ``parameter``, of its shape."""

    def agreed(self, parameter: nn.Parameter) -> Mapping[str, Tensor]:
        """Returns the state that is the same on all ranks of the group."""


class Stateless:
    """An exchange that carries nothing."""

    def commit(self, finite: Tensor) -> None:
        pass

    def carried(self, parameter: nn.Parameter) -> Mapping[str, Tensor]:
        return {}

    def agreed(self, parameter: nn.Parameter) -> Mapping[str, Tensor]:
        return {}


class Dense(Stateless):
    """One all-reduce of a flat copy, in ``dtype`` where given."""

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
    """Returns a copy of all tensors, one after another, ``[elements]``."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copies the pieces of ``flat`` into ``tensors``."""
    pieces = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_([*tensors], [p.view_as(t) for p, t in zip(pieces, tensors, strict=True)])


class Carried:
    """One tensor per parameter. What a step leaves counts only once the step is known to be taken."""

    def __init__(self, tensors: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        self._held = dict(tensors)
        self._left: dict[nn.Parameter, Tensor] = {}

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._held

    def __getitem__(self, parameter: nn.Parameter) -> Tensor:
        return self._held[parameter]

    def leave(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Notes what this step leaves; ``value`` is not copied."""
        self._left[parameter] = value.view_as(self._held[parameter])

    def commit(self, finite: Tensor) -> None:
        """Takes over what the step has left where ``finite``, a scalar bool on the device; else nothing changes."""
        for parameter, value in self._left.items():
            held = self._held[parameter]
            held.copy_(torch.where(finite, value, held))
        self._left.clear()


def zeros(parameters: Iterable[nn.Parameter]) -> Carried:
    return Carried((p, torch.zeros(p.shape, dtype=p.dtype, device=p.device)) for p in parameters)
