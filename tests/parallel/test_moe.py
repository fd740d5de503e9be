"""Compares mixtures of experts with one process under every layout that supports them."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_train.errors import UserError
from hpc_train.layout.techniques import KINDS, SCHEDULES
from tests.parallel.cells import MIXTURES, UNEVEN_BATCH, Cell, Form, in_two_forms
from tests.parallel.oracle import check_cells

STEPS = {"micro_batches": 4}


def replicas(world_size: int) -> list[Cell]:
    """Returns every mixture under every data-parallel kind, with 1 and 4 micro-batches."""
    strategies: list[dict[str, Any]] = [{"dp": world_size, "data_parallel": kind} for kind in KINDS]
    strategies += [strategy | {"shard": 2} for strategy in strategies if KINDS[strategy["data_parallel"]].shards]
    return [
        Cell(world_size, model, strategy=strategy, batch=batch)
        for model in MIXTURES
        for strategy in strategies
        for batch in ({"micro_batches": 1}, STEPS)
    ]


@in_two_forms(60)
def test_replicas(form: Form) -> None:
    check_cells(form(replicas(4)))


@in_two_forms(120)
def test_pipelines(form: Form) -> None:
    cells = [
        Cell(2, model, strategy={"pp": 2, "schedule": name, "stages_per_rank": row.stages_per_rank[0]}, batch=STEPS)
        for model in MIXTURES
        for name, row in SCHEDULES.items()
        if name != "sequential"
    ]
    check_cells(form(cells))


@in_two_forms(60)
def test_pipelines_of_replicas(form: Form) -> None:
    cells = [
        Cell(4, model, strategy={"pp": 2, "dp": 2, "data_parallel": kind}, batch=STEPS)
        for model in MIXTURES
        for kind in ("allreduce", "zero1")
    ]
    check_cells(form(cells))


@in_two_forms(60)
def test_recomputation_and_precision(form: Form) -> None:
    cells = [
        Cell(2, model, strategy=strategy, batch=STEPS, **extra)
        for model in MIXTURES
        for strategy in ({"dp": 2}, {"dp": 2, "data_parallel": "zero2"}, {"pp": 2})
        for extra in (
            {"train": {"activation_checkpointing": "full"}},
            {"train": {"activation_checkpointing": "ops"}},
            {"precision": "fp32"},
            {"precision": "fp32", "loss_scale": 1024.0},
        )
    ]
    check_cells(form(cells))


@pytest.mark.long_form(900)  # test_recomputation_and_precision covers the numbers of the same code without the compiler
@pytest.mark.timeout(3000)
def test_compiled() -> None:
    cells = [
        Cell(2, model, strategy=strategy, batch=STEPS, train={"compile": True} | train)
        for model in ("gpt-moe", "gpt-moe-bias")
        for strategy in ({"dp": 2}, {"dp": 2, "data_parallel": "zero3"})
        for train in ({}, {"activation_checkpointing": "full"})
    ]
    check_cells(cells, timeout=2500)


@pytest.mark.parametrize(
    ("strategy", "train", "reason"),
    [
        ({"tp": 2}, {}, "does not split experts"),
        ({"cp": 2}, {}, "per sequence"),
        ({"dp": 2}, {"reproducible": "any_world_size"}, "routers"),
        ({"dp": 2}, {"compile": True, "cuda_graphs": True}, "CUDA graphs"),
    ],
    ids=str,
)
def test_layouts_that_would_be_wrong_are_refused(strategy: Any, train: Any, reason: str) -> None:
    batch = {"global_size": UNEVEN_BATCH}
    with pytest.raises(UserError, match=reason):
        Cell(2, "gpt-moe", strategy=strategy, batch=batch, train=train).layout()
