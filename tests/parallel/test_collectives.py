"""The exchange of small values between ranks without pickles."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpc_train.parallel.collectives import broadcast_plain, gather_plain
from tests.ranks import run_on_world

VALUES: list[Any] = [None, {"a": [1, 0.1 + 0.2, "é" * 1000]}, ""]  # of different lengths


def exchange(rank: int, world_size: int) -> tuple[list[Any], Any]:
    group = dist.group.WORLD
    assert group is not None
    return gather_plain(VALUES[rank], group), broadcast_plain(VALUES[1] if rank == 0 else "mine", group)


def test_all_ranks_have_the_values_of_all_ranks() -> None:
    assert run_on_world(3, exchange) == [(VALUES, VALUES[1])] * 3


class Canary:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise AssertionError('code of another rank ran')",)


def pose_as_a_rank(rank: int, world_size: int) -> str:
    """Rank 1 sends a pickle, as torch's function for objects would take it."""
    group = dist.group.WORLD
    assert group is not None
    if rank == 1:
        _send(pickle.dumps(Canary()), group)
        return ""
    with pytest.raises(UnicodeDecodeError):
        gather_plain("", group)
    return "refused"


def _send(data: bytes, group: dist.ProcessGroup) -> None:
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(sizes, torch.tensor([own.numel()]), group=group)
    dist.all_gather([torch.empty_like(own) for _ in sizes], own, group=group)


def test_a_pickle_is_not_read() -> None:
    assert run_on_world(2, pose_as_a_rank) == ["refused", ""]
