"""Losses with a count of their own: how their gradients come to be divided by it.

The backward divides by the number of targets in the data, which is known before the step. What the loss counts
(samples, weights, elements) is known only after the last forward, so the gradients are multiplied by the ratio of the
two afterwards, once. It is one all-reduce of a scalar and one pass over the gradients, and the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_train.parallel.gradient_norm import multiply_
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.replicas import Replicas


def finish(
    replicas: Iterable[Replicas], parameters: Iterable[nn.Parameter], mesh: Mesh, own_count: Tensor, target_count: int
) -> None:
    """Finishes all ``replicas`` of this rank, and divides the gradients by the count of the loss. Collective.

    Compression carries what it leaves out to the next step, so there the division comes before the reduction, which
    has not begun. Elsewhere it comes after it: a part of the gradients was reduced during the backward.

    Args:
        parameters: all of this rank, every copy of a tied one.
        own_count: what the loss counted on this rank.
        target_count: of the data of the global batch, by which the gradients are divided already.
    """
    replicas = list(replicas)
    compresses = any(each.compression is not None for each in replicas)
    if compresses:
        divide_(parameters, mesh, own_count, target_count)
    for each in replicas:
        each.finish()
    if not compresses:
        divide_(parameters, mesh, own_count, target_count)


@torch.no_grad()
def divide_(parameters: Iterable[nn.Parameter], mesh: Mesh, own_count: Tensor, target_count: int) -> None:
    """From a gradient divided by ``target_count`` to one divided by ``own_count`` of all ranks. Collective.

    Tensor-parallel ranks computed the same count, and only the first one's counts. Where it is zero, the sum of losses
    is left as it is.
    """
    count = own_count.to(mesh.device, torch.float64) * (mesh.tp_rank == 0)
    if mesh.layout.world_size > 1:
        dist.all_reduce(count)
    ratio = max(1, target_count) / torch.where(count == 0, 1.0, count)
    gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
    multiply_([grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients], ratio)
