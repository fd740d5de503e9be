"""Exchanges small values between ranks as JSON: texts, numbers, None, and lists and dicts of them with texts as keys.

torch's functions for Python objects send pickles, which run code where they are read. A tuple arrives as a list.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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
