"""Our own reduction of gradients over the data axis, after the backward of the last micro-batch.

It does not hook into autograd, so it is right for every pipeline schedule, also for those that split the backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

IN_FLIGHT = 4  # buckets: enough to keep the network busy, and a bound on the memory for flat copies


class GradientReduction:
    """Sums gradients over the ranks of ``group``, in flat buckets of at most ``bucket_cap_mb`` MiB.

    Args:
        parameters: the same on all ranks of ``group`` and in the same order; of a DTensor the local shard is summed.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, bucket_cap_mb: float) -> None:
        self._group = group
        self._buckets = _plan(list(parameters), int(bucket_cap_mb * 2**20))

    def reduce(self) -> None:
        """Collective. Afterwards every ``.grad`` holds the sum; one that was None somewhere counts as zero there."""
        pending: deque[tuple[dist.Work, list[Tensor], Tensor]] = deque()
        for bucket in self._buckets:
            gradients = [local_gradient(parameter) for parameter in bucket]
            single = len(gradients) == 1 and gradients[0].is_contiguous()
            flat = gradients[0] if single else torch.cat([gradient.reshape(-1) for gradient in gradients])
            work = dist.all_reduce(flat, group=self._group, async_op=True)
            pending.append((work, [] if single else gradients, flat))
            if len(pending) == IN_FLIGHT:
                _finish(*pending.popleft())
        while pending:
            _finish(*pending.popleft())


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


def _finish(work: dist.Work, gradients: list[Tensor], flat: Tensor) -> None:
    work.wait()
    if gradients:
        pieces = flat.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [p.view_as(g) for p, g in zip(pieces, gradients, strict=True)])
