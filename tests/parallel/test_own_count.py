"""A loss with a count of its own: sum and gradients are divided by that count under every strategy.

The weights of ``gpt-weighted`` and ``custom-weighted`` depend on the targets, so that the count is another share of the
data's on every rank, in every micro-batch and in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hpc_train.config.schema import CustomModelConfig
from hpc_train.layout.techniques import KINDS, SCHEDULES
from hpc_train.models.build import build_model
from hpc_train.parallel.build import build_engine
from tests.parallel.cells import CLASSES, Cell, Form, in_two_forms
from tests.parallel.oracle import (
    check_cells,
    error,
    local_batch,
    mesh_of,
    relative,
    train_engine,
    train_plainly,
)
from tests.parallel.test_compression import check_whole
from tests.ranks import run_on_world

ACCUMULATED = {"micro_batches": 3}
SMALL = {"bucket_cap_mb": 0.001}
REPRODUCIBLE: dict[str, Any] = {
    "train": {"reproducible": "any_world_size"},
    "batch": {"logical_micro_batches": 8},
}
EVERYTHING = {"compression": "topk", "compression_share": 1.0}
FULL_RANK = {"compression": "powersgd", "compression_rank": 99}


def scaled(**args: Any) -> CustomModelConfig:
    return CustomModelConfig(_target_="tests.parallel.module.ScaledTiny", args={"classes": CLASSES} | args)


def norm_and_losses(
    rank: int, world_size: int, cell: Cell, model: CustomModelConfig | None = None
) -> tuple[float, float, float]:
    """The gradient norm and the loss of the first step, and the loss of an evaluation, with another model."""
    config = cell.config()
    config.model = model or Cell(1, "gpt-weighted").config().model
    mesh = mesh_of(cell, rank)
    engine = build_engine(config, mesh)
    batch = local_batch(cell, mesh.layout, mesh.dp_rank, 0)
    loss = engine.reduce(engine.train_step(0, batch)).loss
    return engine.clip_grad_norm_(0.0).item(), loss, engine.reduce(engine.eval_step(batch)).loss


def test_ten_times_the_sum_and_ten_times_the_count_are_the_same_loss() -> None:
    expected = train_plainly(Cell(1, "custom"))
    cell = Cell(2, "custom", strategy={"dp": 2}, batch=ACCUMULATED)
    for norm, loss, evaluated in run_on_world(2, norm_and_losses, cell, scaled(scale=10)):
        assert loss == pytest.approx(expected.losses[0], rel=1e-12)
        assert evaluated == pytest.approx(expected.losses[0], rel=1e-12)
        assert norm == pytest.approx(expected.norms[0], rel=1e-12)


def test_tensor_parallel_ranks_count_once() -> None:
    """The config refuses a custom model on them; the engine divides it rightly all the same."""
    expected = train_plainly(Cell(1, "gpt-weighted"))
    for norm, loss, _ in run_on_world(2, norm_and_losses, Cell(2, strategy={"tp": 2}, batch=ACCUMULATED)):
        assert loss == pytest.approx(expected.losses[0], rel=1e-12)
        assert norm == pytest.approx(expected.norms[0], rel=1e-12)


def data_parallel_cells() -> list[Cell]:
    splits: list[dict[str, Any]] = [{"dp": 2, "data_parallel": kind} | SMALL for kind in KINDS]
    chosen = [Cell(2, m, strategy=s, batch=ACCUMULATED) for s in splits for m in ("gpt-weighted", "custom-weighted")]
    chosen += [
        Cell(2, "gpt-weighted", strategy={"dp": 2, "data_parallel": "zero2", "offload": "all"}),
        Cell(2, "gpt-weighted", strategy={"dp": 2}, loss_scale=1024.0),
        Cell(2, "custom-weighted", strategy={"dp": 2}, **REPRODUCIBLE),
        Cell(2, "gpt-weighted", strategy={"dp": 2}, loss_scale=1024.0, **REPRODUCIBLE),
    ]
    schedules = [
        {"pp": 2, "schedule": schedule, "stages_per_rank": SCHEDULES[schedule].stages_per_rank[0]}
        for schedule in SCHEDULES
    ]
    return chosen + [Cell(2, "gpt-weighted", strategy=split, loss_scale=1024.0) for split in schedules]


def cells_of_four() -> list[Cell]:
    """Pipelines of two stages and two replicas, and shards beside replicas."""
    pairs = [(schedule, kind) for schedule, row in SCHEDULES.items() for kind in row.data_parallel]
    splits: list[dict[str, Any]] = [
        {
            "dp": 2,
            "data_parallel": kind,
            "pp": 2,
            "schedule": schedule,
            "stages_per_rank": SCHEDULES[schedule].stages_per_rank[0],
        }
        for schedule, kind in pairs
    ]
    splits += [{"dp": 4, "data_parallel": "zero3", "shard": 2}]
    return [Cell(4, "gpt-weighted", strategy=split | SMALL) for split in splits]


@in_two_forms(60)
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.long_form(60))])
def test_the_count_of_the_loss_divides_under_every_strategy(
    world_size: int, form: Form, record: Callable[..., None]
) -> None:
    single = [Cell(1, model, batch=ACCUMULATED) for model in ("gpt-weighted", "custom-weighted")]
    single += [Cell(1, "custom-weighted", **REPRODUCIBLE)]
    chosen = {1: single, 2: data_parallel_cells(), 4: cells_of_four()}[world_size]
    record(check_cells(form(chosen, "data_parallel", "model", "reproducible", "pp", "loss_scale")), [])


@pytest.mark.long_form(10, cases=["4"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_compressed_gradients_are_divided_too(world_size: int, record: Callable[..., None]) -> None:
    split: dict[str, Any] = {"dp": 2, "data_parallel": "allreduce", "bucket_cap_mb": 0.002}
    if world_size == 4:
        split |= {"pp": 2, "schedule": "zbv", "stages_per_rank": 2}
    chosen = [
        Cell(world_size, "gpt-weighted", strategy=split | compression, batch={"micro_batches": 4})
        for compression in (EVERYTHING, FULL_RANK)
    ]
    record(check_whole(chosen), [])


def difference_of_a_growing_count(rank: int, world_size: int, cells: list[Cell]) -> list[float]:
    """Between two trainings whose losses are the same but for the factor of sum and count, which grows by the step."""
    found = []
    for cell in cells:
        mesh = mesh_of(cell, rank)
        records = []
        for grows in (False, True):
            config = cell.config()
            config.model = scaled(grows=grows)
            records.append(train_engine(cell, mesh, build_engine(config, mesh)))
        plain, growing = records
        found.append(max(relative(growing.norms, plain.norms), error(growing.parameters, plain.parameters)))
    return found


def test_what_compression_carries_to_the_next_step_is_divided_already() -> None:
    techniques: list[dict[str, Any]] = [
        {"compression": "topk", "compression_share": 0.1},
        {"compression": "powersgd", "compression_rank": 1},
    ]
    common = {"dp": 2, "data_parallel": "allreduce"}
    chosen = [Cell(2, "custom", strategy=common | each, batch={"micro_batches": 1}) for each in techniques]
    for differences in run_on_world(2, difference_of_a_growing_count, chosen):
        assert max(differences) < 1e-10


def test_built_in_losses_are_divided_by_the_count_of_the_data() -> None:
    """It is known before the backward, and nothing is multiplied or sent afterwards."""
    own = {model: build_model(Cell(1, model).config().model, 0).own_count for model in ("gpt", "vit", "custom")}
    assert own == {"gpt": False, "vit": False, "custom": False}
    assert all(build_model(Cell(1, f"{model}-weighted").config().model, 0).own_count for model in ("gpt", "custom"))
