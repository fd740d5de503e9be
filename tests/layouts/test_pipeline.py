"""Every pipeline trains and evaluates as one process does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hpc_train.config.layout import SCHEDULES, STAGES_PER_RANK
from hpc_train.data.batch import Batch, StepBatch
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.mesh import Mesh, join_mesh
from hpc_train.parallel.pipeline_engine import PipelineEngine
from tests.layouts.cells import Cell, cells
from tests.layouts.oracle import check_cells, local_batch
from tests.ranks import run_ranks


def pipeline(schedule: str, **fields: Any) -> dict[str, Any]:
    return {"pp": 2, "schedule": schedule, "stages_per_rank": STAGES_PER_RANK[schedule][0]} | fields


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_pipeline_trains_as_one_process_does(world_size: int, record: Callable[..., None]) -> None:
    allowed, refused = cells(world_size, pipelines=True)
    record(check_cells(allowed, timeout=280), refused)
    pairs = {(cell.strategy["schedule"], cell.strategy["data_parallel"]) for cell in allowed if cell.strategy["dp"] > 1}
    table = {(schedule, kind) for schedule, kinds in SCHEDULES.items() for kind in kinds}
    assert pairs == (table if world_size == 4 else set())


def test_three_dimensions(record: Callable[..., None]) -> None:
    splits = [
        pipeline("1f1b", dp=2, tp=2, data_parallel="reduce"),
        pipeline("1f1b", dp=2, tp=2, data_parallel="zero3"),
        pipeline("zbv", dp=2, tp=2, data_parallel="zero2"),
        pipeline("interleaved_1f1b", dp=4, data_parallel="zero2", shard=2),
    ]
    record(check_cells([Cell(8, "gpt-tied", strategy=split) for split in splits], timeout=250), [])


def test_a_given_split_and_more_stages_and_micro_batches(record: Callable[..., None]) -> None:
    chosen = [
        Cell(2, "gpt-tied", strategy=pipeline("1f1b", pp_split=[1, 2])),
        Cell(2, "vit", strategy=pipeline("1f1b", pp_split=[2, 1]), batch={"micro_size": 1}),
        Cell(2, "gpt-tied", strategy=pipeline("interleaved_1f1b", stages_per_rank=3), batch={"micro_batches": 8}),
        Cell(2, "gpt-tied", strategy=pipeline("interleaved_zero_bubble", stages_per_rank=3)),
        Cell(2, "gpt-tied", strategy=pipeline("zbv"), batch={"micro_batches": 5}),
        Cell(2, "gpt", strategy=pipeline("gpipe"), batch={"micro_batches": 10}),
    ]
    record(check_cells(chosen), [])


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activation_checkpointing_in_a_pipeline(mode: str, record: Callable[..., None]) -> None:
    train = {"activation_checkpointing": mode}
    small = {"bucket_cap_mb": 0.001}
    chosen = [
        Cell(4, "gpt-tied", strategy=pipeline(schedule, dp=2, data_parallel=kind) | small, train=train)
        for schedule, kind in (
            ("1f1b", "ddp"),
            ("1f1b", "zero3"),
            ("interleaved_1f1b", "reduce"),
            ("interleaved_zero_bubble", "zero1"),
            ("zbv", "reduce"),
            ("zbv", "zero2"),
        )
    ]
    record(check_cells(chosen), [])


def test_a_loss_scale_in_a_pipeline(record: Callable[..., None]) -> None:
    chosen = [Cell(2, "gpt-tied", strategy=pipeline(schedule), loss_scale=1024.0) for schedule in SCHEDULES]
    chosen += [Cell(2, "vit", "fp32", pipeline(schedule), {"global_size": 8}) for schedule in SCHEDULES]
    record(check_cells(chosen), [])


def test_compiled_layers_in_a_pipeline(record: Callable[..., None]) -> None:
    record(check_cells([Cell(2, strategy=pipeline("1f1b"), train={"compile": True})], timeout=250), [])


def test_evaluation_leaves_the_training_alone_and_takes_other_shapes() -> None:
    chosen = [Cell(2, "gpt-tied", strategy=pipeline(schedule)) for schedule in SCHEDULES]
    splits = (("1f1b", "zero2"), ("1f1b", "zero3"), ("1f1b", "ddp"), ("zbv", "zero2"))
    sharded = [Cell(4, "vit", strategy=pipeline(schedule, dp=2, data_parallel=kind)) for schedule, kind in splits]
    run_ranks(2, _evaluate_between, chosen)
    run_ranks(4, _evaluate_between, sharded)


def _evaluate_between(rank: int, _: int, chosen: list[Cell]) -> None:
    for cell in chosen:
        mesh = join_mesh(cell.layout(), rank, torch.device("cpu"))
        plain, evaluated = (_three_steps(cell, mesh, evaluate) for evaluate in (False, True))
        for name, value in plain.items():
            assert torch.equal(value, evaluated[name]), f"{cell}: {name}"


def _three_steps(cell: Cell, mesh: Mesh, evaluate: bool) -> dict[str, Tensor]:
    """The local parameters after three steps; between them evaluations in two shapes that must agree."""
    engine = build_engine(cell.config(), mesh)
    optimizer = torch.optim.SGD(engine.named_parameters().values(), lr=0.1)
    for step in range(3):
        batch = local_batch(cell, mesh.layout, mesh.dp_rank, step)
        engine.train_step(step, batch)
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        if evaluate:
            numbers = [engine.reduce(engine.eval_step(shape)) for shape in (batch, _one_by_one(batch))]
            assert numbers[0].target_count == batch.target_count == numbers[1].target_count, cell
            assert numbers[0].accuracy == numbers[1].accuracy, cell
            assert numbers[0].loss == pytest.approx(numbers[1].loss, rel=1e-12), cell
            assert all(part.training for part in engine.parts)
    return {name: _local(value.detach()).clone() for name, value in engine.named_parameters().items()}


def _one_by_one(batch: StepBatch) -> StepBatch:
    """The same samples in micro-batches of one."""
    pieces = [
        Batch(*piece)
        for micro in batch.micro_batches
        for piece in zip(micro.inputs.split(1), micro.targets.split(1), strict=True)
    ]
    return StepBatch(tuple(pieces), batch.target_count)


def _local(value: Tensor) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_travels_in_the_type_that_the_model_computes(precision: str) -> None:
    kinds = (("1f1b", "reduce"), ("1f1b", "zero2"), ("zbv", "zero1"), ("interleaved_1f1b", "ddp"))
    chosen = [
        Cell(4, model, precision, pipeline(schedule, dp=2, data_parallel=kind))
        for schedule, kind in kinds
        for model in ("gpt-tied", "vit")
    ]
    for rank in run_ranks(4, _half_losses, chosen):
        for cell, (loss, wanted) in zip(chosen, rank, strict=True):
            assert loss == pytest.approx(wanted, rel=2e-2), cell


def _half_losses(rank: int, _: int, chosen: list[Cell]) -> list[tuple[float, float]]:
    """The loss of the first step, and the same in fp64; checks what leaves every stage on the way."""
    losses = []
    for cell in chosen:
        mesh = join_mesh(cell.layout(), rank, torch.device("cpu"))
        engine = build_engine(cell.config(), mesh)
        assert isinstance(engine, PipelineEngine)
        seen = _watch_types(engine)
        loss = engine.reduce(engine.train_step(0, local_batch(cell, mesh.layout, mesh.dp_rank, 0))).loss
        assert all(parameter.grad is not None for parameter in engine.named_parameters().values())
        assert all(found == wanted for found, wanted in seen) and seen, f"{cell}: {seen}"
        exact = Cell(cell.world_size, cell.model, "fp64", cell.strategy)
        wanted = build_engine(exact.config(), mesh)
        losses.append(
            (loss, wanted.reduce(wanted.train_step(0, local_batch(exact, mesh.layout, mesh.dp_rank, 0))).loss)
        )
    return losses


def _watch_types(engine: PipelineEngine) -> list[tuple[torch.dtype, torch.dtype]]:
    """What each forward of a stage gives, beside the type that the next stage was told."""
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    for part in engine._parts:
        part.model.register_forward_hook(
            lambda _, __, output, told=part.dtype: (
                seen.append((output.dtype, told)) if isinstance(output, Tensor) else seen.append((told, told))
            )
        )
    return seen
