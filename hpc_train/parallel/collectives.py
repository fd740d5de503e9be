"""Exchanges plain values and tensors between ranks, and the samples for a loss that compares the samples of all ranks.

Plain values (texts, numbers, None, lists, and dicts with texts as keys) travel as JSON, since torch's functions for
Python objects send pickles, which run code where they are read. A tuple arrives as a list.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpc_train.errors import UserError
from hpc_train.parallel.mesh import all_gather_tensor, reduce_scatter_tensor


def gather_plain(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Returns the values of all ranks of ``group``, a group on CPUs, in the order of its ranks. Collective."""
    encoded = _encoded(value)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([encoded.numel()]), group=group)
    longest = int(max(sizes))
    padded = torch.cat((encoded, encoded.new_zeros(longest - encoded.numel())))
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return [_decoded(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]


def broadcast_plain(value: Any, group: dist.ProcessGroup) -> Any:
    """Returns the value of the first rank of ``group``, a group on CPUs, on every rank. Collective."""
    is_first = group.rank() == 0
    encoded = _encoded(value if is_first else None)
    size = torch.tensor([encoded.numel()])
    dist.broadcast(size, group=group, group_src=0)
    data = encoded if is_first else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, group=group, group_src=0)
    return _decoded(data)


def _encoded(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decoded(data: Tensor) -> Any:
    return json.loads(data.numpy().tobytes())


_BUCKET_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}  # gloo is fastest with buffers that stay in a cache


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], source: int, group: dist.ProcessGroup, device: torch.device) -> None:
    """Sends the values of ``tensors`` of rank ``source`` of ``group`` to its other ranks, in place. Collective.

    Tensors of one dtype are sent together, 64 MiB at a time (4 MiB on CPUs). A larger tensor is sent without a copy if
    it is contiguous and on ``device``.

    Args:
        tensors: plain tensors on any device, of the same shapes and dtypes and in the same order on all ranks.
        device: the device of the tensors that ``group`` can send.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():  # a rank may hold no rows
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for alike in by_dtype.values():
        bucket: list[Tensor] = []
        for tensor in alike:
            if bucket and sum(other.nbytes for other in bucket) + tensor.nbytes > _BUCKET_BYTES[device.type]:
                _broadcast_bucket(bucket, source, group, device)
                bucket = []
            bucket.append(tensor)
        _broadcast_bucket(bucket, source, group, device)


def _broadcast_bucket(bucket: list[Tensor], source: int, group: dist.ProcessGroup, device: torch.device) -> None:
    first = bucket[0]
    if len(bucket) == 1 and first.is_contiguous() and first.device == device:
        dist.broadcast(first.view(-1).view(torch.uint8), group=group, group_src=source)
        return
    sent = torch.cat([tensor.reshape(-1).to(device) for tensor in bucket])
    dist.broadcast(sent.view(torch.uint8), group=group, group_src=source)
    if group.rank() == source:
        return
    for tensor, values in zip(bucket, sent.split([tensor.numel() for tensor in bucket]), strict=True):
        tensor.copy_(values.view(tensor.shape))


@torch._disable_dynamo
def gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenates the rows of ``tensor`` of all ranks in the order of the global batch. Collective; the host waits.

    Each rank computes the losses of its samples against the samples of all ranks, so the losses of all ranks add up to
    the loss of one process. An embedding influences all of them: the backward pass adds up the gradients of all ranks
    and returns to each rank the gradients of its rows (a reduce-scatter).

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
    count = torch.tensor([len(tensor)], device=tensor.device)
    counts = count.new_empty(dist.get_world_size(group))
    all_gather_tensor(counts, count, group=group)
    rows: list[int] = counts.tolist()
    if not any(rows):
        return tensor
    gathered: Tensor = _Gather.apply(tensor, rows, group)
    return gathered


class _Gather(torch.autograd.Function):
    """Gathers the rows of all ranks. All ranks send the same number of rows, as the collectives require; rows of
    padding are dropped after the transfer."""

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
    return F.pad(rows, [0, 0] * (rows.ndim - 1) + [0, size - len(rows)])
