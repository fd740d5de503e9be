"""Implements the gradient reduction of the kind ``allreduce``, which overlaps with the last backward pass.

A bucket is sent as soon as all backward passes of the step have added to its gradients, while the backward pass
computes earlier layers or the pipeline computes other stages of the rank. A schedule that splits the backward pass does
not run autograd's hooks; then the buckets of a stage are sent after its last backward pass, and the remaining buckets
at the end of the step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from hpc_train.layout.techniques import IN_FLIGHT
from hpc_train.parallel.compression import Dense, Exchange
from hpc_train.parallel.gradient_norm import sparse_gradient

SendOrder = list["GradientReduction"]


class GradientReduction:
    """Sums gradients over ranks, in buckets of at most ``bucket_cap_mb`` MiB.

    Args:
        parameters: parameter -> the ranks over which its gradient is summed, in the same order on all these ranks; of a
            DTensor the local shard is summed.
        send_order: the reductions of this rank that share groups, in the order of sending, which is the same on all
            ranks; this one is appended. Buckets are then sent as soon as their gradients are final. Without it
            ``reduce`` sends them, in the same order on all ranks.
        reduced: called with the parameters of each bucket when their sums are complete.

    Attributes:
        sent: the number of buckets of this step that have been sent.
    """

    def __init__(
        self,
        parameters: Mapping[nn.Parameter, dist.ProcessGroup],
        bucket_cap_mb: float,
        send_order: SendOrder | None = None,
        reduced: Callable[[Sequence[nn.Parameter]], None] | None = None,
    ) -> None:
        self._send_order = send_order
        self._reduced = reduced
        self._exchange: Exchange | None = None
        self._pending: deque[_Sent] = deque()
        self._buckets = _plan(parameters, int(bucket_cap_mb * 2**20))
        self._dense = [Dense(parameters[bucket[0]]) for bucket in self._buckets]
        # parameter -> backward passes that have not added yet
        self._missing: list[dict[nn.Parameter, int]] = [{} for _ in self._buckets]
        self._backwards = 0  # backward passes of the step that have not finished
        self.sent = 0
        if send_order is not None:
            send_order.append(self)
            for index, bucket in enumerate(self._buckets):
                for parameter in bucket:
                    parameter.register_post_accumulate_grad_hook(partial(self._added, index))

    def begin(self, backwards: int, exchange: Exchange | None = None) -> None:
        """Prepares a step of ``backwards`` backward passes that sums its buckets by ``exchange``, or densely without
        one."""
        self.sent = 0
        self._exchange = exchange
        self._backwards = backwards
        self._missing = [dict.fromkeys(bucket, backwards) for bucket in self._buckets]

    def backward_done(self) -> None:
        """Counts a backward pass that has added all its gradients; after the last one of the step all buckets are
        sent."""
        self._backwards -= 1
        if self._backwards == 0:
            for missing in self._missing:
                missing.clear()
            self._send_final()

    @torch.no_grad()
    def reduce(self) -> None:
        """Completes the sums in every ``.grad``; a gradient that is None on some ranks counts as zero there, and one
        that is None on all ranks stays None. Collective."""
        while not self._all_sent:
            self._send_next()
        while self._pending:
            self._finish_next()

    def _added(self, index: int, parameter: nn.Parameter) -> None:
        missing = self._missing[index]
        if parameter not in missing:
            raise RuntimeError("a gradient changed after all backward passes of the step")
        missing[parameter] -= 1
        if missing[parameter] == 0:
            del missing[parameter]
            self._send_final()

    @property
    def _all_sent(self) -> bool:
        return self.sent == len(self._buckets)

    def _send_final(self) -> None:
        """Sends the final buckets up to the first that is not final, so that the order is the same on all ranks."""
        for reduction in self._send_order or ():
            while not reduction._all_sent and not reduction._missing[reduction.sent]:
                reduction._send_next()
            if not reduction._all_sent:
                break

    @torch.no_grad()
    def _send_next(self) -> None:
        bucket = self._buckets[self.sent]
        sum_partial_gradients(bucket)
        used, is_complete = _used(bucket)
        gradients = [local_gradient(parameter) for parameter in bucket]
        exchange = (self._exchange or self._dense[self.sent]).run(bucket, gradients, used)
        self._pending.append(_Sent(next(exchange), exchange, bucket, used, is_complete))
        self.sent += 1
        if len(self._pending) == IN_FLIGHT:
            self._finish_next()

    def _finish_next(self) -> None:
        sent = self._pending.popleft()
        sent.first.wait()
        for following in sent.rest:
            following.wait()
        if not sent.is_whole:
            # an optimizer would decay parameters that have no gradient on any rank and move them by their momentum,
            # unlike one process; the host waits for the device here
            for parameter, uses in zip(sent.bucket, sent.used.tolist(), strict=True):
                if uses == 0:
                    parameter.grad = None
                    if self._exchange is not None:
                        self._exchange.withdraw(parameter)
        if self._reduced is not None:
            self._reduced(sent.bucket)


@dataclass(frozen=True)
class _Sent:
    """Describes a bucket whose sum is not complete.

    Attributes:
        first, rest: its collectives.
        used: the number of ranks on which each parameter has a gradient, once the sum is complete.
        is_whole: whether all of them have a gradient on this rank.
    """

    first: dist.Work
    rest: Iterator[dist.Work]
    bucket: list[nn.Parameter]
    used: Tensor
    is_whole: bool


def _used(bucket: Sequence[nn.Parameter]) -> tuple[Tensor, bool]:
    """Returns 1 for each parameter with a gradient and 0 for the others, and whether all have one."""
    with_gradient = [parameter.grad is not None for parameter in bucket]
    for parameter in bucket:
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise sparse_gradient(f"the parameter of shape {[*parameter.shape]}")
    like: dict[str, Any] = {"dtype": bucket[0].dtype, "device": bucket[0].device}
    if all(with_gradient):
        return torch.ones(len(bucket), **like), True  # made on the device, for which the host does not wait
    return torch.tensor(with_gradient, **like), False


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """Returns this rank's part of the gradient, for changes in place; creates zeros if there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    gradient = parameter.grad
    if isinstance(gradient, DTensor):
        return gradient.to_local()
    return gradient


def sum_partial_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replaces partial gradients of tensor-parallel ranks (of norms over sequence shards) by their sums."""
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
            continue
        if gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def _largest_shard(parameter: nn.Parameter) -> int:
    """Returns the number of elements that the rank with the largest shard of ``parameter`` holds."""
    shape = list(parameter.shape)
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                shape[placement.dim] = math.ceil(shape[placement.dim] / parameter.device_mesh.size(axis))
    return math.prod(shape)


def _plan(parameters: Mapping[nn.Parameter, dist.ProcessGroup], capacity: int) -> list[list[nn.Parameter]]:
    """Returns buckets of one dtype and one group each, from the last parameter to the first, and the same on
    tensor-parallel ranks.

    Ranks that cut at different parameters would call ``sum_partial_gradients`` between different collectives of the
    backward pass, so a shard counts as much as the largest one.
    """
    buckets: list[list[nn.Parameter]] = []
    open_buckets: dict[tuple[torch.dtype, dist.ProcessGroup], tuple[list[nn.Parameter], int]] = {}
    for parameter, group in reversed([*parameters.items()]):
        size = _largest_shard(parameter) * parameter.element_size()
        bucket, filled = open_buckets.get((parameter.dtype, group), ([], 0))
        if not bucket or filled + size > capacity:
            bucket = []
            filled = 0
            buckets.append(bucket)
        bucket.append(parameter)
        open_buckets[parameter.dtype, group] = (bucket, filled + size)
    return buckets
