"""Agrees on results and errors among the ranks of a save or load.

A rank sends and receives the same few bytes whatever the number of ranks, apart from an error, which one rank sends to
all. ``all_gather_object`` would give each rank the objects of all others, padded to the size of the largest.

Without a group there is one rank: a process that has not initialized ``torch.distributed``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Group = dist.ProcessGroup | None


def rank_in(group: Group) -> int:
    """Returns the rank of this process in ``group``."""
    if group is None:
        return 0
    return dist.get_rank(group)


def size_of(group: Group) -> int:
    """Returns the number of ranks of ``group``."""
    if group is None:
        return 1
    return dist.get_world_size(group)


def on_first(action: Callable[[], Any], group: Group) -> Any:
    """Runs ``action`` on the first rank and broadcasts its result, or raises its exception on all ranks."""
    if group is None:
        return action()
    outcome: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            outcome[0] = action()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, group_src=0, group=group)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def lowest(problem: Any, group: Group) -> Any:
    """Returns on all ranks the problem of the lowest rank that has one; None if ``problem`` is None on all. Collective.

    Args:
        problem: a value that can be pickled, or None.
    """
    if group is None:
        return problem
    ranks = dist.get_world_size(group)
    first = torch.tensor(ranks if problem is None else dist.get_rank(group))
    dist.all_reduce(first, dist.ReduceOp.MIN, group=group)
    rank = int(first.item())
    if rank == ranks:
        return None
    return from_rank(rank, problem, group)


def raise_lowest(error: Exception | None, group: Group) -> None:
    """Raises on all ranks the error of the lowest rank that has one. Collective."""
    error = lowest(error, group)
    if error is not None:
        raise error


def from_rank(rank: int, value: Any, group: Group) -> Any:
    """Returns ``value`` of ``rank`` of the group on all ranks. Collective."""
    if group is None:
        return value
    values = [value]
    dist.broadcast_object_list(values, group_src=rank, group=group)
    return values[0]


def broadcast_bytes(data: bytes | None, group: Group) -> bytes:
    """Returns the bytes of the first rank on all ranks. Collective.

    Args:
        data: the bytes on the first rank; ignored on the others.
    """
    if group is None:
        return data or b""
    size = torch.tensor(len(data or b""))
    dist.broadcast(size, group=group, group_src=0)
    if not size:
        return b""
    if dist.get_rank(group) == 0 and data is not None:
        dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), group=group, group_src=0)
        return data
    content = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(content, group=group, group_src=0)
    return content.numpy().tobytes()
