"""Optimizers of a user under every strategy, compared with one process, and their state in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpc_train.config.schema import Config, OptimConfig
from hpc_train.errors import UserError
from hpc_train.models.build import build_model
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.parallelise import materialise
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import load
from hpc_train.train.optimizer import Optimizer
from tests.checkpoint.training import Training, join_again
from tests.layouts.cells import Cell
from tests.layouts.oracle import MAX_NORM, error, global_batch, local_batch, mesh_of, whole
from tests.ranks import run_on_world
from tests.train.own_optimizers import Lion, Preconditioned
from tests.train.runs import frozen

OWN = "tests.train.own_optimizers"
STEPS, LR = 3, 1e-2
MIXED = OptimConfig(  # an optimizer for each kind of matrix, so that one training shows them all
    _target_="torch.optim.RMSprop",
    args={"alpha": 0.9},
    lr=LR,
    groups={
        "muon": {"match": r"wq|wk|ffn\.w1", "_target_": "torch.optim.Muon", "args": {"ns_steps": 3}},
        "lion": {"match": r"wv|ffn_norm", "_target_": f"{OWN}.Lion", "elementwise": True, "lr_factor": 0.5},
        "adafactor": {"match": r"wo|attention_norm|head\.norm", "_target_": "torch.optim.Adafactor"},
        "sides": {"match": r"ffn\.w2", "_target_": f"{OWN}.Preconditioned", "weight_decay": 0.2},
        "factor": {"match": "stem", "lr_factor": 2.0, "args": {"alpha": 0.5}},
    },
)


def expected(name: str, parameter: nn.Parameter) -> torch.optim.Optimizer:
    """The optimizer of one parameter, by hand."""
    decay = 0.1 if parameter.ndim >= 2 else 0.0
    one = [parameter]
    if any(part in name for part in ("wq", "wk", "ffn.w1")):
        return torch.optim.Muon(one, lr=LR, weight_decay=decay, ns_steps=3)
    if "wv" in name or "ffn_norm" in name:
        return Lion(one, lr=LR / 2, weight_decay=decay)
    if "wo" in name or "attention_norm" in name or "head.norm" in name:
        return torch.optim.Adafactor(one, lr=LR, weight_decay=decay)
    if "ffn.w2" in name:
        return Preconditioned(one, lr=LR, weight_decay=0.2)
    in_stem = "stem" in name
    return torch.optim.RMSprop(one, 2 * LR if in_stem else LR, 0.5 if in_stem else 0.9, weight_decay=decay)


def train_plainly(cell: Cell) -> Mapping[str, Tensor]:
    config = cell.config()
    model: Any = build_model(config.model, config.train.seed)
    materialise(model, torch.device("cpu"), config.train.seed, torch.float64)
    optimizers = [expected(name, parameter) for name, parameter in model.named_parameters()]
    for step in range(STEPS):
        model.zero_grad()
        inputs, targets = global_batch(cell, step)
        total, count = model(inputs, {}, targets)
        (total / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        for optimizer in optimizers:
            optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def compare(rank: int, world_size: int, cells: list[Cell]) -> list[float]:
    return [compare_one(rank, cell) for cell in cells]


def compare_one(rank: int, cell: Cell) -> float:
    mesh, config = mesh_of(cell, rank), cell.config()
    engine = build_engine(config, mesh)
    parameters = engine.named_parameters()
    optimizer = Optimizer(MIXED, parameters, config.strategy.offload == "optimizer")
    for step in range(STEPS):
        engine.train_step(step, local_batch(cell, mesh.layout, mesh.dp_rank, step))
        optimizer.step(LR, engine.clip_grad_norm_(MAX_NORM).isfinite())
    return error({name: whole(value.detach()) for name, value in parameters.items()}, train_plainly(cell))


SPLITS: list[dict[str, Any]] = [
    {"dp": 4, "data_parallel": "ddp"},
    {"dp": 4, "data_parallel": "zero1"},
    {"dp": 4, "data_parallel": "zero2", "offload": "optimizer"},
    {"dp": 4, "data_parallel": "zero3"},
    {"dp": 4, "data_parallel": "zero3", "shard": 2},
    {"dp": 2, "pp": 2, "data_parallel": "zero1"},
    {"dp": 2, "tp": 2, "data_parallel": "allreduce"},
    {"dp": 2, "tp": 2, "data_parallel": "zero3"},
    {"pp": 2, "tp": 2, "offload": "optimizer"},
]


def test_every_optimizer_trains_as_in_one_process_under_every_strategy() -> None:
    batch = {"micro_batches": 2}
    cells = [Cell(4, "gpt-tied" if "pp" in split else "gpt", strategy=split, batch=batch) for split in SPLITS]
    ranks = run_on_world(4, compare, cells)
    worst = {str(cell): max(errors) for cell, errors in zip(cells, zip(*ranks, strict=True), strict=True)}
    assert not {cell: error for cell, error in worst.items() if not error < 1e-10}
    single = [Cell(1, strategy={}), Cell(1, strategy={"offload": "optimizer"})]
    assert max(run_on_world(1, compare, single)[0]) < 1e-10


SAVED = [
    "+strategy=zero3 strategy.shard=2",
    "+strategy=hybrid strategy.dp=1 strategy.pp=2 strategy.tp=2",
    "+strategy=dp",
    "+strategy=zero1",
]


def configured(path: Path, *overrides: str) -> RunDirectory:
    return frozen(path, *overrides, "precision=fp64", "train.steps=8", "optim.clip_norm=0.05", "model.dropout=0")


def go_on(rank: int, world_size: int, paths: list[str]) -> list[float]:
    """Takes a step under each layout in turn, from the checkpoint of the one before; the last one never stops."""
    found: list[Mapping[str, Tensor]] = []
    for number, path in enumerate(paths):
        training = opened(path, rank, world_size)
        if number and path != paths[-1]:
            training.manager.run = RunDirectory(Path(paths[0]))
            assert training.manager.restore() is not None
        training.steps(*((0, len(paths) - 1) if path == paths[-1] else (number, number + 1)))
        training.manager.run = RunDirectory(Path(paths[0]))
        if path != paths[-1]:
            training.manager.save(number + 1, {"tokens": 0, "loss_scale": None}, final=True)
        found = [
            *found[-1:],
            {name: whole(value.detach()) for name, value in training.engine.named_parameters().items()},
        ]
    return [float((found[0][name] - value).abs().max()) for name, value in found[1].items() if name in found[0]]


def opened(path: str, rank: int, world_size: int) -> Training:
    run = RunDirectory(Path(path))
    config = replace(load(run), optim=replace(MIXED, schedule="constant", warmup_steps=0))
    return Training.of(run, config, join_again(config, rank, world_size))


def test_a_run_goes_on_under_other_layouts(tmp_path: Path) -> None:
    paths = [str(configured(tmp_path / str(n), *over.split()).path) for n, over in enumerate([*SAVED, SAVED[2]])]
    differences = [each for rank in run_on_world(4, go_on, paths) for each in rank]
    assert differences
    assert max(differences) < 1e-10
