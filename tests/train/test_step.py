"""The agreement of the ranks before each step, in the rounds of large worlds."""

from __future__ import annotations

import os

import pytest
import torch

from hpc_train.layout.layout import Layout
from hpc_train.parallel.mesh import join_mesh
from tests.ranks import run_ranks


def agree(rank: int, world_size: int, steps: int) -> None:
    """Compares the agreements of some steps with their sums; then the second rank dies before it posts."""
    from hpc_train.train import step

    step.RING_RANKS = 1
    mesh = join_mesh(Layout(world_size, 1, 1, 1, "ddp", "1f1b", 1, 1, 1), rank, torch.device("cpu"))
    control = step.Control(mesh)
    for number in range(steps):
        control.post(rank == number, rank + number, save=rank == number + 1, items=rank)
        nested = step.Control(mesh, step.NESTED)
        nested.post(False, 1, end=True)
        assert nested.read() == step.Agreement(False, (world_size,), False, True, 0, 0)
        items = sum(range(world_size))
        stop, save = number < world_size, number + 1 < world_size
        assert control.read() == step.Agreement(stop, (items + world_size * number,), save, False, items, 0)
    if rank == 1:
        os._exit(0)
    control.post(False, 0)
    control.read()


def test_the_ranks_of_large_worlds_agree_until_one_dies() -> None:
    with pytest.raises(AssertionError) as ended:
        run_ranks(3, agree, 4)
    assert "rank 1: died without a word" in str(ended.value)
    assert str(ended.value).count("RuntimeError") == 2, "the others learn it from their connections"
