"""Compressed gradients: in the limit those of one process; before it, nothing is lost, and no rank has other sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.parallel import compression as exchanges
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.compression import Exchange, PowerSGD, TopK
from hpc_train.parallel.mesh import join_mesh
from hpc_train.parallel.reduction import GradientReduction
from tests.parallel.cells import Cell, Form, in_two_forms
from tests.parallel.oracle import Outcome, compare_cells, error, line, local_batch, merge, whole
from tests.ranks import run_ranks

EVERYTHING = {"compression": "topk", "compression_share": 1.0}
FULL_RANK = {"compression": "powersgd", "compression_rank": 99}


def cells(world_size: int, compression: dict[str, Any]) -> list[Cell]:
    """Under every way to keep two replicas in step, and every schedule of pipelines."""
    common = compression | {"dp": 2, "bucket_cap_mb": 0.002}
    if world_size == 2:
        splits = [common | {"data_parallel": kind} for kind in ("ddp", "allreduce")]
        return [Cell(2, model, strategy=s, batch={"micro_batches": 3}) for s in splits for model in ("gpt", "custom")]
    schedules = (("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2), ("zbv", 2))
    common |= {"data_parallel": "allreduce", "pp": 2}
    pipelines = [common | {"schedule": schedule, "stages_per_rank": stages} for schedule, stages in schedules]
    return [Cell(4, "gpt-tied", strategy=split, batch={"micro_batches": 4}) for split in pipelines]


def compare_whole(rank: int, world_size: int, chosen: list[Cell]) -> list[Outcome]:
    """With factors that are no smaller than the matrix: nothing is left out."""
    exchanges.pays = lambda shape, rank: len(shape) > 1
    return compare_cells(rank, world_size, chosen)


@in_two_forms(25)
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long_form(25))])
def test_what_leaves_nothing_out_trains_as_one_process_does(
    world_size: int, form: Form, record: Callable[..., None]
) -> None:
    chosen = form(cells(world_size, EVERYTHING) + cells(world_size, FULL_RANK), "compression", "data_parallel")
    outcomes = [merge(list(found)) for found in zip(*run_ranks(world_size, compare_whole, chosen), strict=True)]
    assert all(outcome.worst < 1e-10 for outcome in outcomes), "\n".join(map(line, outcomes))
    record(outcomes, [])


def cast_errors(rank: int, world_size: int, split: dict[str, Any]) -> list[float]:
    """Of the gradients that are summed in fp16 and in bf16, against those that are not."""
    found = []
    for technique in ("none", "fp16", "bf16"):
        cell = Cell(world_size, strategy=split | {"compression": technique})
        mesh = join_mesh(cell.layout(), rank, torch.device("cpu"))
        engine = build_engine(cell.config(), mesh)
        engine.train_step(0, local_batch(cell, mesh.layout, mesh.dp_rank, 0))
        found.append({name: whole(parameter.grad) for name, parameter in engine.named_parameters().items()})
    dense, *casts = found
    return [error(cast, dense) for cast in casts]


@pytest.mark.parametrize(
    "split",
    [
        pytest.param({"dp": 2}, id="dp"),
        pytest.param({"dp": 2, "tp": 2, "data_parallel": "allreduce"}, id="tp", marks=pytest.mark.long_form(10)),
    ],
)
def test_a_cast_rounds_and_no_more(split: dict[str, Any]) -> None:
    for fp16, bf16 in run_ranks(2 * split.get("tp", 1), cast_errors, split):
        assert 1e-5 < fp16 < 2e-3 < bf16 < 2e-2


SHAPES = ((12, 8), (30,), (6, 4, 3), (5, 7))


def draw(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def make(technique: str, parameters: list[nn.Parameter]) -> Exchange:
    group: Any = dist.group.WORLD
    if technique == "topk":
        return TopK(parameters, group, 0.1)
    return PowerSGD({str(index): value for index, value in enumerate(parameters)}, group, rank=1)


def exchange_for_a_while(rank: int, world_size: int, technique: str, bad_step: int | None) -> dict[str, Any]:
    """Eight steps; rank 1 has a NaN in ``bad_step``. Sums over the steps that were taken, and what is left."""
    parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in SHAPES]
    reduction = GradientReduction(parameters, dist.group.WORLD, 1e-3)  # type: ignore[arg-type]
    exchange = make(technique, parameters)
    applied, drawn = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    kept_still = True
    for step in range(8):
        gradients = draw(rank, step)
        finite = step != bad_step
        if not finite and rank == 1:
            gradients[0][3, 3] = float("nan")
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        before = [value.clone() for value in held(exchange, parameters)]
        reduction.begin(1, exchange)
        reduction.reduce()
        seen = torch.stack([p.grad.isfinite().all() for p in parameters if p.grad is not None]).all()
        assert bool(seen) == finite, "every rank sees the NaN of one"
        exchange.commit(seen)
        if not finite:
            kept_still = all(torch.equal(a, b) for a, b in zip(before, held(exchange, parameters), strict=True))
            continue
        for index, parameter in enumerate(parameters):
            applied[index] += parameter.grad  # type: ignore[arg-type]
            drawn[index] += gradients[index]
    left = [exchange.residual[p] if p in exchange.residual else torch.zeros_like(p) for p in parameters]
    return {
        "applied": [value.numpy() for value in applied],
        "drawn": [value.numpy() for value in drawn],
        "left": [value.numpy() for value in left],
        "kept_still": kept_still,
    }


def held(exchange: Exchange, parameters: list[nn.Parameter]) -> list[Tensor]:
    return [state[p] for p in parameters for state in (exchange.residual, exchange.basis) if p in state]


@pytest.mark.parametrize("bad_step", [None, 4])
@pytest.mark.parametrize("technique", ["topk", "powersgd"])
def test_what_was_sent_and_what_is_left_are_the_sum_of_all_gradients(technique: str, bad_step: int | None) -> None:
    ranks = run_ranks(3, exchange_for_a_while, technique, bad_step)
    for index in range(len(SHAPES)):
        applied, *others = (rank["applied"][index] for rank in ranks)
        assert all((other == applied).all() for other in others), "the ranks do not have the same bits"
        owed = sum(rank["left"][index] for rank in ranks)
        assert abs(applied + owed - sum(rank["drawn"][index] for rank in ranks)).max() < 1e-12
    assert any(abs(rank["left"][0]).max() > 0.1 for rank in ranks), "something must have been left out"
    assert all(rank["kept_still"] for rank in ranks), "a step that is skipped leaves everything as it was"
