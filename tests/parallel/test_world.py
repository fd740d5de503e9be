"""A world that stays up gives each function what new processes would give, and is replaced when one fails."""

from __future__ import annotations

import os
import random
import time

import pytest
import torch

from hpc_train.parallel.mesh import join_mesh
from tests.parallel.cells import Cell
from tests.parallel.oracle import mesh_of
from tests.ranks import run_on_world


def process(rank: int, world_size: int) -> int:
    return os.getpid()


def changes_everything(rank: int, world_size: int) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(os.getpid())
    random.seed(os.getpid())
    os.environ["LEFT_BEHIND"] = "1"


def state(rank: int, world_size: int) -> tuple[object, ...]:
    mesh_of(Cell(2, strategy={"dp": 2}), rank)
    return torch.get_default_dtype(), torch.initial_seed(), random.random(), os.environ.get("LEFT_BEHIND")


def sleeps(rank: int, world_size: int) -> None:
    time.sleep(60 * rank)


def dies(rank: int, world_size: int) -> None:
    os._exit(1)


def makes_a_mesh(rank: int, world_size: int) -> None:
    join_mesh(Cell(2, strategy={"dp": 2}).layout(), rank, torch.device("cpu"))


def test_the_next_function_sees_nothing_of_the_one_before() -> None:
    before = run_on_world(2, process), run_on_world(2, state)
    run_on_world(2, changes_everything)
    assert (run_on_world(2, process), run_on_world(2, state)) == before


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (sleeps, TimeoutError, r"ranks \[1\] gave no result in 1 s"),
        (dies, AssertionError, "died without a word"),
        (makes_a_mesh, AssertionError, "left behind for the next function"),
    ],
)
def test_a_function_that_fails_costs_its_world(function: object, error: type[Exception], message: str) -> None:
    before = run_on_world(2, process)
    with pytest.raises(error, match=message):
        run_on_world(2, function, timeout=1 if function is sleeps else 60)  # type: ignore[arg-type]
    assert not set(run_on_world(2, process)) & set(before)
