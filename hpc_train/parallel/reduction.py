"""The reduction of the kind ``allreduce``: sums gradients over the data axis during the last backward and after it.

A bucket is sent as soon as every backward of the step has added to all of its gradients, while the backward computes
earlier layers or the pipeline computes other stages of the rank. A schedule that splits the backward does not run
autograd's hooks; then the buckets of a stage are sent after its last backward, and the rest at the end of the step.
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

from hpc_train.config.schema import StrategyConfig
from hpc_train.parallel.compression.exchange import Dense, Exchange

SendOrder = list["GradientReduction"]
DEFAULT_CAP_MB = 25.0  # size of DDP's buckets; the search for the fastest size starts with it
IN_FLIGHT = 4  # buckets: enough to keep the network busy, and a bound on the memory for flat copies


def first_cap(strategy: StrategyConfig) -> float:
    """Returns the size of the gradient buckets in the first steps, in MiB."""
    return DEFAULT_CAP_MB if isinstance(strategy.bucket_cap_mb, str) else float(strategy.bucket_cap_mb)


class GradientReduction:
    """Sums gradients over the ranks of ``group``, in buckets of at most ``bucket_cap_mb`` MiB.

    Args:
        parameters: the same on all ranks of ``group`` and in the same order; of a DTensor the local shard is summed.
        turns: the reductions of this rank that share ``group``, in the order in which they send, which is the same on
            all ranks; this one comes last. With them buckets are sent as soon as their gradients are final, without
            them by ``reduce``, which is then called in the same order.

    Attributes:
        sent: buckets of this step that are on their way or done.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: dist.ProcessGroup,
        bucket_cap_mb: float,
        turns: SendOrder | None = None,
    ) -> None:
        self._parameters, self._turns = list(parameters), turns
        self._dense = Dense(group)
        self._exchange: Exchange = self._dense
        self._pending: deque[tuple[dist.Work, Iterator[dist.Work]]] = deque()
        self._hooks: list[RemovableHandle] = []
        self.rebucket(bucket_cap_mb)
        if turns is not None:
            turns.append(self)

    def rebucket(self, cap_mb: float) -> None:
        """Changes the size of the buckets. Call it between two steps."""
        self._buckets = _plan(self._parameters, int(cap_mb * 2**20))
        self._to_come: list[dict[nn.Parameter, int]] = [{} for _ in self._buckets]  # backwards that have not added yet
        self._backwards = 0  # that are not through
        self.sent = 0
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._added, index))
            for index, bucket in enumerate(self._buckets)
            for parameter in (bucket if self._turns is not None else ())
        ]

    def begin(self, backwards: int, exchange: Exchange | None = None) -> None:
        """Prepares a step of ``backwards`` backwards that sums its buckets by ``exchange``, or densely without one."""
        self.sent = 0
        self._exchange = exchange or self._dense
        self._backwards = backwards
        self._to_come = [dict.fromkeys(bucket, backwards) for bucket in self._buckets]

    def backward_done(self) -> None:
        """Counts a backward that has added all its gradients; after the last one of the step all buckets are sent."""
        self._backwards -= 1
        if self._backwards == 0:
            for to_come in self._to_come:
                to_come.clear()
            self._take_turns()

    @torch.no_grad()
    def reduce(self) -> None:
        """Collective. Afterwards every ``.grad`` holds the sum; one that was None somewhere counts as zero there."""
        while not self._all_sent:
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
            self._take_turns()

    @property
    def _all_sent(self) -> bool:
        return self.sent == len(self._buckets)

    def _take_turns(self) -> None:
        """Sends what is final, as far as nothing that comes before it is missing: in the same order on all ranks."""
        for reduction in self._turns or ():
            while not reduction._all_sent and not reduction._to_come[reduction.sent]:
                reduction._send_next()
            if not reduction._all_sent:
                break

    @torch.no_grad()
    def _send_next(self) -> None:
        bucket = self._buckets[self.sent]
        sum_partial_gradients(bucket)
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


def sum_partial_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sums gradients that tensor-parallel ranks hold in parts (of norms over sequence shards), in place of them."""
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
            continue
        if gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


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
