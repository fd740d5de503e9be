"""Replicas that compute different numbers of micro-batches train as one process does (``batch.balance``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from hpc_train.errors import UserError
from hpc_train.models.build import build_model
from hpc_train.models.wrapped import WrappedModel
from hpc_train.parallel.build import _check_micro_batches, build_engine
from tests.parallel.cells import Cell
from tests.parallel.oracle import check_cells, local_batch, mesh_of
from tests.ranks import run_on_world

FOUR = {"micro_batches": 4, "global_size": 15, "balance": True}
UNEVEN = ((7, 1), (1, 7))  # of the first and the second step
ALLREDUCE, ZERO1 = "allreduce", "zero1"
STAGES: dict[str, Any] = {"dp": 2, "pp": 2, "schedule": "1f1b"}
ON_TWO = [
    Cell(2, "gpt-tied", strategy={"dp": 2, "bucket_cap_mb": 0.001}, batch=FOUR, counts=UNEVEN),
    Cell(2, "custom-weighted", strategy={"dp": 2, "data_parallel": ALLREDUCE}, batch=FOUR, counts=UNEVEN),
    Cell(2, "vit", strategy={"dp": 2, "data_parallel": ZERO1}, batch=FOUR, counts=((5, 3), (2, 6))),
]
ON_FOUR = [
    Cell(4, strategy={"dp": 4, "data_parallel": "zero3", "shard": 2}, batch=FOUR, counts=UNEVEN),
    Cell(4, strategy={"dp": 2, "tp": 2, "data_parallel": ALLREDUCE}, batch=FOUR, counts=UNEVEN),
    Cell(4, strategy=STAGES, batch=FOUR, counts=((6, 2), (2, 6))),
]
MORE_ON_TWO = [
    Cell(2, "gpt-moe", strategy={"dp": 2, "data_parallel": ALLREDUCE}, batch=FOUR, counts=((3, 5), (6, 2))),
    Cell(2, "custom", strategy={"dp": 2, "data_parallel": ZERO1}, batch=FOUR, counts=((5, 3), (1, 7))),
]
MORE_ON_FOUR = [
    Cell(4, "vit", strategy={"dp": 4, "data_parallel": "zero2", "shard": 2}, batch=FOUR, counts=((3, 5), (6, 2))),
    Cell(4, strategy={"dp": 2, "cp": 2}, batch=FOUR, counts=UNEVEN),
    Cell(4, strategy=STAGES | {"data_parallel": "zero2"}, batch=FOUR, counts=((3, 5), (5, 3))),
    Cell(
        4,
        "gpt-tied",
        strategy=STAGES | {"schedule": "interleaved_1f1b", "stages_per_rank": 2, "data_parallel": ALLREDUCE},
        batch=FOUR | {"micro_batches": 6, "global_size": 24},
        counts=((4, 8), (8, 4)),
    ),
    Cell(
        4,
        strategy=STAGES | {"schedule": "dualpipev", "stages_per_rank": 2, "data_parallel": ALLREDUCE},
        batch=FOUR | {"micro_batches": 5, "global_size": 20},
        counts=((4, 6), (6, 4)),
    ),
]


@pytest.mark.parametrize("cells", [ON_TWO, ON_FOUR], ids=["two", "four"])
def test_uneven_replicas_train_as_one_process_does(cells: list[Cell], record: Callable[..., None]) -> None:
    record(check_cells(cells), [])


@pytest.mark.long_form(20)  # the kinds and the splits above
@pytest.mark.parametrize("cells", [MORE_ON_TWO, MORE_ON_FOUR], ids=["two", "four"])
def test_other_uneven_replicas(cells: list[Cell], record: Callable[..., None]) -> None:
    record(check_cells(cells), [])


def losses_and_norms(rank: int, _: int, cells: list[Cell], counts: list[tuple[int, int]]) -> list[list[list[float]]]:
    """Returns the loss and the gradient norm of a step with dropout, for each cell and each of ``counts``."""
    results = []
    for cell in cells:
        config, mesh = cell.config(), mesh_of(cell, rank)
        config.model.dropout = 0.5
        engine = build_engine(config, mesh)
        of_cell = []
        for of_replicas in counts:
            batch = local_batch(replace(cell, counts=(of_replicas,)), mesh.layout, mesh.dp_rank, 0)
            loss = engine.reduce(engine.train_step(7, batch)).loss
            of_cell.append([loss, engine.clip_grad_norm_(0.0).item()])
        results.append(of_cell)
    return results


def test_dropout_does_not_depend_on_the_owner_of_a_micro_batch() -> None:
    splits: list[dict[str, Any]] = [{"dp": 2, "pp": 2, "schedule": "1f1b"}, {"dp": 2, "tp": 2}]
    full = {"activation_checkpointing": "full"}
    kind = {"data_parallel": ALLREDUCE}
    cells = [Cell(4, strategy=split | kind, batch=FOUR, train=full) for split in splits]
    for of_rank in run_on_world(4, losses_and_norms, cells, [(4, 4), (6, 2), (2, 6)]):
        for even, *uneven in of_rank:
            assert all(numbers == pytest.approx(even, rel=1e-12) for numbers in uneven)


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)


@pytest.mark.parametrize(
    ("cell", "normalizes"),
    [
        (Cell(2, "custom", strategy={"dp": 2}, batch=FOUR | {"global_size": 16}), True),
        (Cell(4, "custom", strategy={"dp": 4, "data_parallel": "zero3", "shard": 2}, batch=FOUR), False),
    ],
)
def test_models_whose_ranks_exchange_something_in_each_micro_batch_are_refused(cell: Cell, normalizes: bool) -> None:
    model: Any = Normalized() if normalizes else build_model(cell.config().model, 0)
    assert normalizes or isinstance(model, WrappedModel)
    layout = cell.layout()
    with pytest.raises(UserError, match="all ranks compute equally many"):
        _check_micro_batches(cell.config(), layout, model)
    _check_micro_batches(replace(cell, batch=cell.batch | {"balance": False}).config(), layout, model)
