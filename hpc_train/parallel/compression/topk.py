"""Top-k: of each gradient only its largest elements are sent; what is not sent is added to the next gradient.

Error feedback as in arXiv:1809.07599; momentum correction as in Deep Gradient Compression, arXiv:1712.01887 (sec. 3.2):
what is accumulated is then the velocity, and both forget an element when it is sent.
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
    """An ``Exchange`` (see there): values and indices of all ranks, gathered in one collective and added up.

    Args:
        share: of the elements of each parameter, rounded up.
        momentum: of the correction; 0: none. The sums are then ``1 / (1 - momentum)`` times as large.
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
        for row in received.view(-1, sent.numel()):  # in one order on all ranks: the same bits
            theirs, where = row.split([sent.numel() - index.numel(), index.numel()])
            total.index_add_(0, where, theirs.clone().view(value.dtype))
        unflatten(total, gradients)

    def commit(self, finite: Tensor) -> None:
        self._residual.commit(finite)
        self._velocity.commit(finite)

    def carried(self, parameter: nn.Parameter) -> Mapping[str, Tensor]:
        kept = {"residual": self._residual[parameter]}
        return kept | {"velocity": self._velocity[parameter]} if parameter in self._velocity else kept

    def agreed(self, parameter: nn.Parameter) -> Mapping[str, Tensor]:
        return {}

    def _choose(self, parameter: nn.Parameter, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The largest elements of what is owed and where they are, ``[k]`` each; notes what is left of it."""
        added = gradient
        if self._momentum:
            added = self._velocity[parameter].view(-1) * self._momentum + gradient
        owed = self._residual[parameter].view(-1) + added
        index = owed.abs().topk(math.ceil(self._share * owed.numel()), sorted=False).indices  # NaN is the largest
        value = owed[index]
        self._residual.leave(parameter, owed.index_fill_(0, index, 0))
        if self._momentum:
            self._velocity.leave(parameter, added.index_fill_(0, index, 0))
        return value, index
