"""Collects the samples of all ranks for a loss that compares them, such as a contrastive loss.

Each rank computes the losses of its own samples against the samples of all ranks, so the losses of all ranks add up to
that of one process. The embedding of a sample influences the losses of all ranks. The backward pass therefore adds up
the gradients of all ranks and returns to each rank those of its own samples (a reduce-scatter).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpc_train.errors import UserError
from hpc_train.parallel.mesh import all_gather_tensor, reduce_scatter_tensor


@torch._disable_dynamo
def gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenates the rows of ``tensor`` of all ranks in the order of the ranks. Collective; the host waits for it.

    The order is that of the global batch. Gradients flow back to the rank of each row.

    Args:
        tensor: ``[rows, ...]``; the number of rows may differ between ranks and may be 0.

    Raises:
        UserError: ``tensor`` is a scalar.
    """
    if tensor.ndim == 0:
        raise UserError(
            "gather received a scalar, but it concatenates the rows of all ranks",
            where="gather in the loss of the model",
            fix="pass a tensor with one row for each sample, such as gather(embeddings)",
        )
    if dist.get_world_size(group) == 1:
        return tensor
    rows = _row_counts(tensor, group)
    if not any(rows):
        return tensor
    gathered: Tensor = _Gather.apply(tensor, rows, group)
    return gathered


def _row_counts(tensor: Tensor, group: dist.ProcessGroup) -> list[int]:
    count = torch.tensor([len(tensor)], device=tensor.device)
    counts = count.new_empty(dist.get_world_size(group))
    all_gather_tensor(counts, count, group=group)
    rows: list[int] = counts.tolist()
    return rows


class _Gather(torch.autograd.Function):
    """All ranks send equally many rows, as the collectives require; rows of padding are dropped after the transfer."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rows: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.rows = rows
        ctx.group = group
        sent = _padded(tensor.detach(), max(rows)).contiguous()
        received = sent.new_empty(len(rows) * max(rows), *tensor.shape[1:])
        all_gather_tensor(received, sent, group=group)
        blocks = zip(received.split(max(rows)), rows, strict=True)
        return torch.cat([block[:count] for block, count in blocks])

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        rows = ctx.rows
        rank = dist.get_rank(ctx.group)
        wide = gradient.float() if gradient.dtype.itemsize < 4 else gradient  # a sum over many ranks
        sent = torch.cat([_padded(block, max(rows)) for block in wide.split(rows)])
        summed = sent.new_empty(max(rows), *gradient.shape[1:])
        reduce_scatter_tensor(summed, sent, group=ctx.group)
        return summed[: rows[rank]].to(gradient.dtype), None, None


def _padded(rows: Tensor, size: int) -> Tensor:
    missing = size - len(rows)
    if missing:
        return F.pad(rows, [0, 0] * (rows.ndim - 1) + [0, missing])
    return rows
