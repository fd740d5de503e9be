"""Replicas that compute different numbers of micro-batches train as one process does (``batch.balance``)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.parallel.cells import Cell
from tests.parallel.oracle import check_cells

FOUR = {"micro_batches": 4, "global_size": 15, "balance": True}
UNEVEN = ((7, 1), (1, 7))
ALLREDUCE, ZERO1 = "allreduce", "zero1"
ON_TWO = [
    Cell(2, "gpt-tied", strategy={"dp": 2, "bucket_cap_mb": 0.001}, batch=FOUR, counts=UNEVEN),
    Cell(2, "gpt-moe", strategy={"dp": 2, "data_parallel": ALLREDUCE}, batch=FOUR, counts=((3, 5), (6, 2))),
    Cell(2, "custom-weighted", strategy={"dp": 2, "data_parallel": ALLREDUCE}, batch=FOUR, counts=UNEVEN),
    Cell(2, "vit", strategy={"dp": 2, "data_parallel": ZERO1}, batch=FOUR, counts=UNEVEN),
    Cell(2, "custom", strategy={"dp": 2, "data_parallel": ZERO1}, batch=FOUR, counts=((5, 3), (1, 7))),
]
ON_FOUR = [
    Cell(4, strategy={"dp": 4, "data_parallel": "zero3", "shard": 2}, batch=FOUR, counts=UNEVEN),
    Cell(4, "vit", strategy={"dp": 4, "data_parallel": "zero2", "shard": 2}, batch=FOUR, counts=((3, 5), (6, 2))),
    Cell(4, strategy={"dp": 2, "tp": 2, "data_parallel": ALLREDUCE}, batch=FOUR, counts=UNEVEN),
    Cell(4, strategy={"dp": 2, "cp": 2, "data_parallel": "ddp"}, batch=FOUR, counts=UNEVEN),
    Cell(4, strategy={"dp": 2, "pp": 2, "schedule": "1f1b"}, batch=FOUR, counts=((6, 2), (2, 6))),
    Cell(4, strategy={"dp": 2, "pp": 2, "schedule": "1f1b", "data_parallel": "zero2"}, batch=FOUR, counts=((3, 5),)),
    Cell(
        4,
        "gpt-tied",
        strategy={"dp": 2, "pp": 2, "schedule": "interleaved_1f1b", "stages_per_rank": 2, "data_parallel": ALLREDUCE},
        batch=FOUR | {"micro_batches": 6, "global_size": 24},
        counts=((4, 8), (8, 4)),
    ),
    Cell(
        4,
        strategy={"dp": 2, "pp": 2, "schedule": "dualpipev", "stages_per_rank": 2, "data_parallel": ALLREDUCE},
        batch=FOUR | {"micro_batches": 5, "global_size": 20},
        counts=((4, 6), (6, 4)),
    ),
]


@pytest.mark.parametrize("world_size", [2, 4])
def test_uneven_replicas_train_as_one_process_does(world_size: int, record: Callable[..., None]) -> None:
    record(check_cells({2: ON_TWO, 4: ON_FOUR}[world_size]), [])
