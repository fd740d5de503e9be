"""Modules as strangers write them train as in one process under every layout, or are refused before the first update.

An optimizer leaves parameters without a gradient as they are, in one process and under every layout.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hpc_train.config.schema import Config, CustomModelConfig
from hpc_train.data.dataset import Batch, StepBatch
from hpc_train.errors import UserError
from hpc_train.models.build import build_model
from hpc_train.parallel import fsdp
from hpc_train.parallel.build import build_engine
from hpc_train.train.optimizers.optimizer import Optimizer
from hpc_train.train.step import TrainStep
from tests.checkpoint.progress import LONG
from tests.parallel.cells import Cell
from tests.parallel.oracle import error, mesh_of, whole
from tests.parallel.strangers import CLASSES, INPUTS
from tests.ranks import run_on_world

STEPS, RATE, SIZE = 8, 1e-2, 4
OPTIM: dict[str, Any] = {"lr": RATE, "warmup_steps": 0, "schedule": "constant", "clip_norm": 1.0}
SMALL = {"bucket_cap_mb": 1e-4}  # buckets of one and of several parameters


def cell_of(split: dict[str, Any], micro_batches: int = 1, optim: dict[str, Any] | None = None, **train: Any) -> Cell:
    batch: dict[str, Any] = {"global_size": SIZE}
    batch |= {"logical_micro_batches": SIZE} if "reproducible" in train else {"micro_batches": micro_batches}
    return Cell(split.get("dp", 1), "custom", strategy=split, batch=batch, train=train, optim=OPTIM | (optim or {}))


def config_of(cell: Cell, module: str, wrap: list[str] | None = None) -> Config:
    config = cell.config()
    config.model = CustomModelConfig(_target_=f"tests.parallel.strangers.{module}", wrap=wrap)
    return config


def rows(step: int) -> tuple[Tensor, Tensor]:
    """Returns the global batch of a step, whose last number is the step."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(SIZE, INPUTS, generator=generator, dtype=torch.float64)
    inputs[:, -1] = step
    return inputs, torch.randint(CLASSES, (SIZE,), generator=generator)


def train_plainly(cell: Cell, module: str) -> dict[str, Tensor]:
    """One process, torch's AdamW and clipping, and no micro-batches."""
    config = config_of(cell, module)
    model: Any = build_model(config.model, config.train.seed)
    model.to(torch.float64)
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim >= 2) is decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = rows(step)
        total, count = model(inputs, {}, targets)
        (total / count).backward()
        if config.optim.clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip_norm)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def train(cell: Cell, module: str, rank: int, wrap: list[str] | None = None, steps: int = STEPS) -> dict[str, Tensor]:
    mesh = mesh_of(cell, rank)
    config = config_of(cell, module, wrap)
    engine = build_engine(config, mesh)
    parameters = engine.named_parameters()
    take_step = TrainStep(config, mesh, engine, Optimizer(config.optim, parameters), STEPS)
    share = SIZE // mesh.layout.dp
    for step in range(steps):
        inputs, targets = (part[mesh.dp_rank * share :][:share] for part in rows(step))
        pieces = zip(inputs.split(mesh.layout.micro_size), targets.split(mesh.layout.micro_size), strict=True)
        batch = StepBatch(tuple(Batch(*piece) for piece in pieces), SIZE)
        take_step(step, batch)
    return {name: whole(value.detach()) for name, value in parameters.items()}


def errors_of(rank: int, world_size: int, cells: list[tuple[str, Cell, list[str] | None]]) -> list[float]:
    found = []
    for module, cell, wrap in cells:
        expected, trained = train_plainly(cell, module), train(cell, module, rank, wrap)
        assert expected.keys() == trained.keys()
        found.append(error(trained, expected))
    return found


def check(world_size: int, cells: list[tuple[str, Cell, list[str] | None]]) -> None:
    of_ranks = run_on_world(world_size, errors_of, cells)
    errors = {f"{module} {cell}": max(found) for (module, cell, _), *found in zip(cells, *of_ranks, strict=True)}
    assert not {name: found for name, found in errors.items() if not found < 1e-10}


def replicated() -> list[tuple[str, Cell, list[str] | None]]:
    allreduce = {"dp": 2, "data_parallel": "allreduce"}
    cells = [
        cell_of(allreduce),
        cell_of(allreduce | SMALL, micro_batches=2),
        cell_of(allreduce, reproducible="any_world_size"),
        cell_of(allreduce | SMALL, optim={"in_backward": True, "clip_norm": 0.0}),
        cell_of(allreduce | {"compression": "topk", "compression_share": 1.0}),
    ]
    found: list[tuple[str, Cell, list[str] | None]] = [("Experts", cell, None) for cell in cells]
    found += [("Tasks", cell, None) for cell in (cells if LONG else cells[1:2])]
    found += [("CountedExperts", cells[4], None), ("Nested", cells[1], None)]
    return found


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.long_form(12))], ids=["short", "every"])
def test_replicas_leave_them_as_one_process_does(step: int) -> None:
    check(2, replicated()[::step])
    check(1, [("Experts", cell_of({}, micro_batches=2), None), ("Tasks", cell_of({}), None)])


def refusals(rank: int, world_size: int, cells: list[tuple[str, Cell]], steps: int = 1) -> list[str]:
    """What each cell is refused with in so many steps."""
    found = []
    for module, cell in cells:
        try:
            train(cell, module, rank, steps=steps)
            found.append("was not refused")
        except UserError as error:
            found.append(str(error))
    return found


def test_ddp_refuses_them_and_says_what_trains_such_a_model() -> None:
    """In the step that leaves them out, also if that is the last one."""
    once = cell_of({"dp": 2})
    for unused, turns in run_on_world(2, refusals, [("Branch", once), ("Tasks", once)]):
        assert "does not use some parameters" in unused and "strategy.data_parallel=ddp" in unused
        assert "strategy.data_parallel=allreduce" in unused
        assert "does not use some parameters" in turns


ZERO = [{"dp": 2, "data_parallel": kind} for kind in ("zero1", "zero2", "zero3")]


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.long_form(40))], ids=["short", "every"])
def test_shards_leave_them_as_one_process_does(step: int) -> None:
    """With experts that only some ranks use, the model is one group; blocks that all ranks use may be separate."""
    wraps: dict[str, list[str] | None] = {"Experts": [], "CountedExperts": [], "Tasks": None, "Nested": None}
    splits = [(split, micro_batches) for split in ZERO for micro_batches in (1, 2)]
    cells = [(module, cell_of(split, micro), wrap) for split, micro in splits for module, wrap in wraps.items()]
    cells += [("Nested", cell_of(ZERO[2] | {"offload": "all"}, activation_checkpointing="full"), None)]
    check(2, cells[::step])


def test_zero_refuses_blocks_that_only_some_ranks_use() -> None:
    for of_rank in run_on_world(2, refusals, [("Experts", cell_of(split)) for split in ZERO]):
        for answer in of_rank:
            assert "rank 0 gathers experts." in answer and "while rank 1" in answer
            assert "model.wrap=[]" in answer and "strategy.data_parallel=allreduce" in answer


def refused_late(rank: int, world_size: int) -> str:
    """What is said in a step that does not check each call."""
    with mock.patch.object(fsdp, "STEADY_STEPS", 0):
        (answer,) = refusals(rank, world_size, [("Swapped", cell_of(ZERO[2]))])
    return answer


def test_ranks_that_gather_other_blocks_of_one_size_do_not_update() -> None:
    """The collectives of both blocks fit each other, so that nothing waits and each rank gets a mixture."""
    for answer in run_on_world(2, refused_late):
        assert "rank 0 gathers blocks.0 while rank 1 gathers blocks.2" in answer


def test_they_are_refused_before_the_first_update() -> None:
    splits = [{}, {"dp": 2, "data_parallel": "allreduce"}, ZERO[2]]
    for name, words in (
        ("Sparse", "the gradient of first.weight is sparse"),
        ("SparseCall", "is sparse, but gradients are summed"),
        ("Unfreezing", "requires_grad of last.weight became True during training"),
    ):
        answers = run_on_world(1, refusals, [(name, cell_of(splits[0]))])
        answers += run_on_world(2, refusals, [(name, cell_of(split)) for split in splits[1:]])
        assert all(words in answer for of_rank in answers for answer in of_rank), answers
