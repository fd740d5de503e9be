"""Our own reduction of gradients over the data axis, during the backward of the last micro-batch and after it.

A bucket is sent once every backward of the step has added to all of its gradients, while the backward goes on with
earlier layers. It does not rely on being told of them: a schedule that splits the backward adds to gradients without
autograd's hooks, and then the buckets are sent at the end. So it is right for every schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from hpc_train.parallel.compression.exchange import Dense, Exchange

IN_FLIGHT = 4  # buckets: enough to keep the network busy, and a bound on the memory for flat copies


class GradientReduction:
    """Sums gradients over the ranks of ``group``, in buckets of at most ``bucket_cap_mb`` MiB.

    Args:
        parameters: the same on all ranks of ``group`` and in the same order; of a DTensor the local shard is summed.
        overlap: buckets may be sent before ``reduce`` is called. Not where another reduction shares ``group``: the
            ranks would not agree on an order.

    Attributes:
        sent: buckets of this step that are on their way or done.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, bucket_cap_mb: float, overlap: bool = False
    ) -> None:
        self._dense = Dense(group)
        self._exchange: Exchange = self._dense
        self._buckets = _plan(list(parameters), int(bucket_cap_mb * 2**20))
        self._pending: deque[tuple[dist.Work, Iterator[dist.Work]]] = deque()
        self._to_come: list[dict[nn.Parameter, int]] = [{} for _ in self._buckets]  # backwards that have not added yet
        self._hooks: list[RemovableHandle] = []
        self.sent = 0
        for index, bucket in enumerate(self._buckets):
            for parameter in bucket if overlap else ():
                self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(self._added, index)))

    def close(self) -> None:
        """Between steps: another reduction takes over."""
        for hook in self._hooks:
            hook.remove()

    def begin(self, backwards: int, exchange: Exchange | None = None) -> None:
        """Before the backwards of a step, which sums its buckets by ``exchange``; densely without it."""
        self.sent = 0
        self._exchange = exchange or self._dense
        self._to_come = [dict.fromkeys(bucket, backwards) for bucket in self._buckets]

    @torch.no_grad()
    def reduce(self) -> None:
        """Collective. Afterwards every ``.grad`` holds the sum; one that was None somewhere counts as zero there."""
        while self.sent < len(self._buckets):
            self._send_next()
        while self._pending:
            _finish(*self._pending.popleft())

    def _added(self, index: int, parameter: nn.Parameter) -> None:
        to_come = self._to_come[index]
        if parameter not in to_come:
            raise RuntimeError("a gradient was added to after all backwards of the step")
        to_come[parameter] -= 1
        if to_come[parameter] == 0:
            del to_come[parameter]
        while self.sent < len(self._buckets) and not self._to_come[self.sent]:  # in the same order on all ranks
            self._send_next()

    @torch.no_grad()
    def _send_next(self) -> None:
        bucket = self._buckets[self.sent]
        exchange = self._exchange.run(bucket, [local_gradient(parameter) for parameter in bucket])
        self._pending.append((next(exchange), exchange))
        self.sent += 1
        if len(self._pending) == IN_FLIGHT:
            _finish(*self._pending.popleft())


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's share of the gradient, to be changed in place; made of zeros where there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    gradient = parameter.grad
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _plan(parameters: list[nn.Parameter], capacity: int) -> list[list[nn.Parameter]]:
    """Buckets of one dtype, from the last parameter to the first."""
    buckets: list[list[nn.Parameter]] = []
    open_buckets: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
    for parameter in reversed(parameters):
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        size = local.numel() * local.element_size()
        bucket, filled = open_buckets.get(parameter.dtype, ([], 0))
        if not bucket or filled + size > capacity:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(parameter)
        open_buckets[parameter.dtype] = (bucket, filled + size)
    return buckets


def _finish(work: dist.Work, rest: Iterator[dist.Work]) -> None:
    work.wait()
    for following in rest:
        following.wait()
