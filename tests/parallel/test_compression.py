"""Compressed gradients: in the limit those of one process; before it, nothing is lost, and no rank has other sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.models.build import build_model
from hpc_train.parallel import compression, fsdp
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.compression import Exchange, PowerSGD, TopK
from hpc_train.parallel.parallelize import materialize
from hpc_train.parallel.reduction import GradientReduction
from tests.parallel.cells import Cell, Form, in_two_forms
from tests.parallel.oracle import Outcome, compare_cells, error, line, local_batch, merge, mesh_of, whole
from tests.ranks import run_on_world

EVERYTHING = {"compression": "topk", "compression_share": 1.0}
FULL_RANK = {"compression": "powersgd", "compression_rank": 99}


def cells(world_size: int, technique: dict[str, Any]) -> list[Cell]:
    """Under every way to keep two replicas in step, and every schedule of pipelines."""
    common = technique | {"dp": 2, "bucket_cap_mb": 0.002}
    if world_size == 2:
        splits = [common | {"data_parallel": kind} for kind in ("ddp", "allreduce")]
        return [Cell(2, model, strategy=s, batch={"micro_batches": 3}) for s in splits for model in ("gpt", "custom")]
    schedules = (("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2), ("zbv", 2))
    common |= {"data_parallel": "allreduce", "pp": 2}
    pipelines = [common | {"schedule": schedule, "stages_per_rank": stages} for schedule, stages in schedules]
    return [Cell(4, "gpt-tied", strategy=split, batch={"micro_batches": 4}) for split in pipelines]


def compare_whole(rank: int, world_size: int, chosen: list[Cell]) -> list[Outcome]:
    with mock.patch.object(compression, "pays", lambda shape, rank: len(shape) > 1):
        return compare_cells(rank, world_size, chosen)


def check_whole(chosen: list[Cell]) -> list[Outcome]:
    """Compares cells with one process, with factors that are no smaller than the matrix: nothing is left out."""
    ranks = run_on_world(chosen[0].world_size, compare_whole, chosen)
    outcomes = [merge(list(of_ranks)) for of_ranks in zip(*ranks, strict=True)]
    assert all(outcome.worst < 1e-10 for outcome in outcomes), "\n".join(map(line, outcomes))
    return outcomes


@in_two_forms(25)
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long_form(25))])
def test_what_leaves_nothing_out_trains_as_one_process_does(
    world_size: int, form: Form, record: Callable[..., None]
) -> None:
    chosen = form(cells(world_size, EVERYTHING) + cells(world_size, FULL_RANK), "compression", "data_parallel")
    record(check_whole(chosen), [])


def cast_errors(rank: int, world_size: int, split: dict[str, Any]) -> list[float]:
    """Of the gradients that are summed in fp16 and in bf16, against those that are not."""
    found = []
    for technique in ("none", "fp16", "bf16"):
        cell = Cell(world_size, strategy=split | {"compression": technique})
        mesh = mesh_of(cell, rank)
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
    for fp16, bf16 in run_on_world(2 * split.get("tp", 1), cast_errors, split):
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
    world: Any = dist.group.WORLD
    reduction = GradientReduction(dict.fromkeys(parameters, world), 1e-3)
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
    ranks = run_on_world(3, exchange_for_a_while, technique, bad_step)
    for index in range(len(SHAPES)):
        applied, *others = (rank["applied"][index] for rank in ranks)
        assert all((other == applied).all() for other in others), "the ranks do not have the same bits"
        owed = sum(rank["left"][index] for rank in ranks)
        assert abs(applied + owed - sum(rank["drawn"][index] for rank in ranks)).max() < 1e-12
    assert any(abs(rank["left"][0]).max() > 0.1 for rank in ranks), "something must have been left out"
    assert all(rank["kept_still"] for rank in ranks), "a step that is skipped leaves everything as it was"


Gradients = dict[str, Tensor]
CAST = {"compression": "bf16"}
THREE = {"micro_batches": 3}
SPLITS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero1": (2, {"dp": 2, "data_parallel": "zero1"}),
    "zero2": (2, {"dp": 2, "data_parallel": "zero2"}),
    "zero3": (2, {"dp": 2, "data_parallel": "zero3"}),
    "hsdp": (4, {"dp": 4, "shard": 2, "data_parallel": "zero3"}),
    "hsdp of zero1": (4, {"dp": 4, "shard": 2, "data_parallel": "zero1"}),
    "pipeline": (4, {"dp": 2, "pp": 2, "schedule": "1f1b", "data_parallel": "zero2"}),
}


def rounded(gradients: list[Gradients]) -> Gradients:
    """Returns the mean over the two ranks of a shard group, each value and the sum rounded to bf16."""
    one, other = gradients
    return {name: (one[name].bfloat16() + other[name].bfloat16()).double() / 2 for name in one}


def added(gradients: list[Gradients]) -> Gradients:
    return {name: torch.stack([each[name] for each in gradients]).sum(0) for name in gradients[0]}


def alone(cell: Cell) -> Gradients:
    """Returns the gradients of one process that computes and rounds what each rank of ``cell`` would."""
    config, layout = cell.config(), cell.layout()
    model: Any = build_model(config.model, config.train.seed)
    materialize(model, torch.device("cpu"), config.train.seed, torch.float64)
    of_ranks: list[list[Gradients]] = []
    for dp_rank in range(layout.dp):
        batch = local_batch(cell, layout, dp_rank, 0)
        of_ranks.append([])
        for micro in batch.micro_batches:
            model.zero_grad()
            loss, _ = model(micro.inputs, {}, micro.targets)
            (loss * layout.dp / batch.target_count).backward()
            of_ranks[-1].append({name: p.grad.clone() for name, p in model.named_parameters()})
    groups = [of_ranks[first : first + 2] for first in range(0, layout.dp, 2)]
    if "gradients" in layout.kind.shards and layout.pp == 1:  # each micro-batch is reduced
        sums = [added([rounded(list(micro)) for micro in zip(*group, strict=True)]) for group in groups]
    else:
        sums = [rounded([added(rank) for rank in group]) for group in groups]
    return {name: value / len(sums) for name, value in added(sums).items()}


def differences(rank: int, _: int, chosen: list[Cell]) -> list[tuple[float, float]]:
    """Returns the differences from one process that rounds as well, and from one that does not."""
    found = []
    for cell in chosen:
        mesh = mesh_of(cell, rank)
        engine = build_engine(cell.config(), mesh)
        engine.train_step(0, local_batch(cell, mesh.layout, mesh.dp_rank, 0))
        gradients = {name: whole(value.grad) for name, value in engine.named_parameters().items()}
        exact = build_engine(Cell(cell.world_size, strategy=cell.strategy | {"compression": "none"}).config(), mesh)
        exact.train_step(0, local_batch(cell, mesh.layout, mesh.dp_rank, 0))
        others = {name: whole(value.grad) for name, value in exact.named_parameters().items()}
        found.append((error(gradients, alone(cell)), error(gradients, others)))
    return found


@pytest.mark.long_form(10, cases=["4"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_sums_are_those_of_one_process_that_rounds_as_well(world_size: int) -> None:
    splits = [split for ranks, split in SPLITS.values() if ranks == world_size]
    chosen = [Cell(world_size, strategy=split | CAST, batch=THREE) for split in splits]
    for ranks in run_on_world(world_size, differences, chosen):
        for cell, (from_same, from_exact) in zip(chosen, ranks, strict=True):
            assert from_same < 1e-10, cell
            assert 1e-4 < from_exact < 2**-6, "2^-9 of each value and of each sum, which may be smaller than both"


def messages(rank: int, world_size: int, cells: list[Cell]) -> list[list[torch.dtype]]:
    """Returns the dtype of each reduce-scatter of a step of each cell."""
    found = []
    for cell in cells:
        mesh = mesh_of(cell, rank)
        engine = build_engine(cell.config(), mesh)
        with mock.patch.object(fsdp, "reduce_scatter_tensor", side_effect=fsdp.reduce_scatter_tensor) as sent:
            engine.train_step(0, local_batch(cell, mesh.layout, mesh.dp_rank, 0))
        found.append([call.args[1].dtype for call in sent.call_args_list])
    return found


def test_messages_are_in_bf16() -> None:
    """There are those of two layers, of the head and of the rest, once in ``zero1`` and for each
    micro-batch in ``zero2``.
    """
    kinds = {"zero1": 1, "zero2": 3}
    chosen = [Cell(2, "gpt", name, SPLITS[kind][1] | CAST, THREE) for kind in kinds for name in ("fp32", "bf16")]
    expected = [[torch.bfloat16] * 4 * times for times in kinds.values() for _ in range(2)]
    assert run_on_world(2, messages, chosen) == [expected] * 2
