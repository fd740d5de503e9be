"""Implements top-k compression, which sends only the largest elements of each gradient.

The other elements are added to the next gradient (error feedback as in arXiv:1809.07599). With the momentum correction
of Deep Gradient Compression (arXiv:1712.01887, section 3.2) the velocity is accumulated instead of the gradient, and
both are set to zero for elements that are sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.parallel.compression.exchange import flatten, unflatten, zeros
from hpc_train.parallel.mesh import all_gather_tensor


class TopK:
    """Gathers values and indices of all ranks in one collective and adds them up; implements ``Exchange``.

    Args:
        share: the share of the elements of each parameter that is sent, rounded up.
        momentum: the momentum of the correction, which makes the sums ``1 / (1 - momentum)`` times as large; 0
            disables it.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, share: float, momentum: float = 0.0
    ) -> None:
        self._group, self._share, self._momentum = group, share, momentum
        held = list(parameters)
        self._residual = zeros(held)
        self._velocity = zeros(held if momentum else ())

    def run(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> Iterator[dist.Work]:
        """See ``Exchange.run``."""
        values, indices, start = [], [], 0
        for parameter, gradient in zip(parameters, gradients, strict=True):
            value, index = self._choose(parameter, gradient.reshape(-1))
            values.append(value)
            indices.append(index + start)
            start += gradient.numel()
        value, index = flatten(values), flatten(indices).to(torch.int32)
        sent = torch.cat([value.view(torch.int32), index])  # one message
        received = sent.new_empty(dist.get_world_size(self._group) * sent.numel())
        yield all_gather_tensor(received, sent, group=self._group, async_op=True)
        total = value.new_zeros(start)
        for row in received.view(-1, sent.numel()):  # the same order, and thereby the same bits, on all ranks
            theirs, where = row.split([sent.numel() - index.numel(), index.numel()])
            total.index_add_(0, where, theirs.clone().view(value.dtype))
        unflatten(total, gradients)

    def commit(self, finite: Tensor) -> None:
        self._residual.commit(finite)
        self._velocity.commit(finite)

    def local_state(self, parameter: nn.Parameter) -> Mapping[str, Tensor]:
        kept = {"residual": self._residual[parameter]}
        return kept | {"velocity": self._velocity[parameter]} if parameter in self._velocity else kept

    def shared_state(self, parameter: nn.Parameter) -> Mapping[str, Tensor]:
        return {}

    def _choose(self, parameter: nn.Parameter, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the largest elements of gradient plus residual and their indices, ``[k]`` each; keeps the others."""
        added = gradient
        if self._momentum:
            added = self._velocity[parameter].view(-1) * self._momentum + gradient
        corrected = self._residual[parameter].view(-1) + added
        index = (
            corrected.abs().topk(math.ceil(self._share * corrected.numel()), sorted=False).indices
        )  # topk treats NaN as the largest
        value = corrected[index]
        self._residual.set_next(parameter, corrected.index_fill_(0, index, 0))
        if self._momentum:
            self._velocity.set_next(parameter, added.index_fill_(0, index, 0))
        return value, index
