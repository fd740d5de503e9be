"""ZeRO sums gradients in bf16: the sums of one process that rounds the same numbers, in messages of half the size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hpc_train.models.build import build_model
from hpc_train.parallel import fsdp
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.parallelize import materialize
from tests.parallel.cells import Cell
from tests.parallel.oracle import error, local_batch, mesh_of, whole
from tests.ranks import run_on_world, run_ranks

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


def messages(rank: int, world_size: int, cell: Cell) -> list[tuple[str, int]]:
    """Returns the dtype and the elements of each reduce-scatter of a step."""
    found: list[tuple[str, int]] = []
    real = fsdp.reduce_scatter_tensor

    def spy(output: Tensor, input: Tensor, **options: Any) -> Any:
        found.append((str(input.dtype), input.numel()))
        return real(output, input, **options)

    fsdp.reduce_scatter_tensor = spy
    mesh = mesh_of(cell, rank)
    engine = build_engine(cell.config(), mesh)
    engine.train_step(0, local_batch(cell, mesh.layout, mesh.dp_rank, 0))
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("kind", "times"), [("zero1", 1), ("zero2", 3)])
def test_messages_are_in_bf16(kind: str, times: int, precision: str) -> None:
    for sent in run_ranks(2, messages, Cell(2, "gpt", precision, SPLITS[kind][1] | CAST, THREE)):
        assert {dtype for dtype, _ in sent} == {"torch.bfloat16"}
        assert len(sent) == times * 3, "two layers and the rest"
