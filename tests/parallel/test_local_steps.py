"""Replicas that exchange weights every few steps train like one process that simulates them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpc_train.checkpoint.state import OUTER
from hpc_train.config.compose import typed
from hpc_train.config.schema import Config
from hpc_train.data.dataset import IGNORED, StepBatch
from hpc_train.errors import UserError
from hpc_train.models.build import build_model
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.engine import over_replicas
from hpc_train.parallel.local_replicas import LostReplicas
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.parallelize import materialize
from hpc_train.run.agent_worker import SharedBlock
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit, ReplicaLost
from hpc_train.train.optimizers.learning_rate import learning_rates
from hpc_train.train.optimizers.optimizer import Optimizer
from hpc_train.train.optimizers.outer import OuterSteps
from hpc_train.train.step import TrainStep
from tests.checkpoint.tensors import read_tensors
from tests.checkpoint.training import Training, join_again
from tests.config.composing import compose
from tests.parallel.cells import Cell
from tests.parallel.oracle import error, global_batch, local_batch, mesh_of, whole
from tests.ranks import run_on_world, run_ranks
from tests.train.runs import TINY, frozen, run_attempt

STEPS, TOTAL, LOCAL_STEPS = 5, 7, 2
LR, MOMENTUM = 0.7, 0.9
CLIP_NORM = 0.05  # lower than the gradient norms of these models
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Simulated:
    """Holds the result of one process: the weights of each replica, the anchors, the outer momentum and the loss of
    the anchors."""

    weights: list[dict[str, Tensor]]
    anchors: dict[str, Tensor]
    momentum: dict[str, Tensor]
    loss: float


def simulate(cell: Cell, replicas: int, lost: Mapping[int, int] | None = None) -> Simulated:
    """One process trains all replicas in turns.

    Args:
        lost: replica -> the number of steps after which it is lost.
    """
    steps_of = dict.fromkeys(range(replicas), STEPS) | dict(lost or {})
    config = cell.config()
    models: list[Any] = []
    for _ in range(replicas):
        models.append(build_model(config.model, config.train.seed))
        materialize(models[-1], torch.device("cpu"), config.train.seed, torch.float64)
    anchors = {name: nn.Parameter(value.detach().clone()) for name, value in models[0].named_parameters()}
    outer = torch.optim.SGD(anchors.values(), lr=LR, momentum=MOMENTUM, nesterov=True)
    optimizers = []
    for model in models:
        groups = [
            {"params": [p for p in model.parameters() if (p.ndim >= 2) is decays], "weight_decay": 0.1 * decays}
            for decays in (True, False)
        ]
        optimizers.append(torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8))
    rate = learning_rates(config.optim, config.batch.global_size, TOTAL)
    for step in range(STEPS):
        inputs, targets = global_batch(cell, step)
        size = len(inputs)
        present = [replica for replica in range(replicas) if step < steps_of[replica]]
        for replica in present:
            model = models[replica]
            optimizer = optimizers[replica]
            rows = slice(replica * size // replicas, (replica + 1) * size // replicas)
            optimizer.zero_grad()
            total, count = model(inputs[rows], {}, targets[rows])
            (total / count).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
            optimizer.step()
        if (step + 1) % LOCAL_STEPS == 0:
            values = [dict(models[replica].named_parameters()) for replica in present]
            for name, anchor in anchors.items():
                anchor.grad = torch.stack([anchor.detach() - value[name].detach() for value in values]).mean(0)
            outer.step()
            with torch.no_grad():
                for value in values:
                    for name, anchor in anchors.items():
                        value[name].copy_(anchor)
    momentum = {name: outer.state[anchor]["momentum_buffer"] for name, anchor in anchors.items()}
    weights = [{name: value.detach() for name, value in model.named_parameters()} for model in models]
    whole_model: Any = models[0]
    total, count = torch.func.functional_call(whole_model, dict(anchors), (*_batch(cell),))[:2]
    return Simulated(weights, {n: v.detach() for n, v in anchors.items()}, momentum, (total / count).item())


def _batch(cell: Cell) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    inputs, targets = global_batch(cell, STEPS)
    return inputs, {}, targets


def of_replica(cell: Cell, mesh: Mesh, step: int) -> StepBatch:
    """The share of this rank, with the targets of its replica."""
    batch = local_batch(cell, mesh.layout, mesh.dp_rank, step)
    _, targets = global_batch(cell, step)
    size = len(targets)
    replicas = mesh.layout.replicas
    rows = slice(mesh.replica_rank * size // replicas, (mesh.replica_rank + 1) * size // replicas)
    return replace(batch, target_count=int((targets[rows] != IGNORED).sum()))


def against_one_process(rank: int, world_size: int, cells: list[Cell]) -> list[dict[str, float]]:
    """The largest relative errors of each cell."""
    found = []
    simulated: dict[tuple[int, str], Simulated] = {}  # by the number of replicas and the model
    for cell in cells:
        config = cell.config()
        mesh = mesh_of(cell, rank)
        key = mesh.layout.replicas, str(config.model)
        wanted = simulated[key] = simulated.get(key) or simulate(cell, mesh.layout.replicas)
        engine = build_engine(config, mesh)
        parameters = engine.named_parameters()
        optimizer = Optimizer(config.optim, parameters)
        outer = OuterSteps(config.strategy, mesh, engine, optimizer)
        outer.begin()
        take_step = TrainStep(config, mesh, engine, optimizer, TOTAL, outer=outer)
        for step in range(STEPS):
            take_step(step, of_replica(cell, mesh, step))
        weights = {name: whole(value) for name, value in parameters.items()}
        with outer.anchored():
            anchors = {name: whole(value) for name, value in parameters.items()}
            result = engine.eval_step(local_batch(cell, mesh.layout, mesh.dp_rank, STEPS))
            evaluated = engine.reduce(over_replicas(result, mesh))
        after = {name: whole(value) for name, value in parameters.items()}
        assert all(torch.equal(value, weights[name]) for name, value in after.items()), "evaluation changed weights"
        assert any(not torch.equal(value, weights[name]) for name, value in anchors.items())
        saved = outer.saved({})
        momentum = {name: whole(saved[f"{OUTER}{name}.momentum"]) for name in parameters}
        found.append(
            {
                "weights": error(weights, wanted.weights[mesh.replica_rank]),
                "anchors": error(anchors, wanted.anchors),
                "momentum": error(momentum, wanted.momentum),
                "loss": abs(evaluated.loss - wanted.loss) / wanted.loss,
            }
        )
    return found


LOST_AFTER = 3  # steps, between two outer steps


def go_on_after_a_loss(rank: int, world_size: int, cell: Cell) -> dict[str, float] | None:
    """The largest relative errors of a rank of the replicas that are left; None on the ranks of the last replica."""
    config = cell.config()
    mesh = mesh_of(cell, rank)
    replicas = mesh.layout.replicas
    wanted = simulate(cell, replicas, {replicas - 1: LOST_AFTER})
    engine = build_engine(config, mesh)
    parameters = engine.named_parameters()
    optimizer = Optimizer(config.optim, parameters)
    outer = OuterSteps(config.strategy, mesh, engine, optimizer)
    outer.begin()
    take_step = TrainStep(config, mesh, engine, optimizer, TOTAL, outer=outer)
    for step in range(LOST_AFTER):
        take_step(step, of_replica(cell, mesh, step))
    if mesh.replica_rank == replicas - 1:
        mesh.connections.cut()  # as the kernel does for a process that ends
        return None
    block = SharedBlock.create()
    lost = LostReplicas(block, mesh)
    with pytest.raises(ReplicaLost) as failure:
        take_step(LOST_AFTER, of_replica(cell, mesh, LOST_AFTER))
    block.lost_replicas = frozenset({replicas - 1})  # as the agent does
    left = lost.mesh_without(mesh, failure.value)
    assert left.layout.replicas == replicas - 1 and left.replica_rank == mesh.replica_rank
    outer.go_on(left, LOST_AFTER + 1, last=False)
    take_step = take_step.go_on(left)
    for step in range(LOST_AFTER + 1, STEPS):
        take_step(step, of_replica(cell, mesh, step))
    weights = {name: whole(value) for name, value in parameters.items()}
    with outer.anchored():
        anchors = {name: whole(value) for name, value in parameters.items()}
    saved = outer.saved({})
    momentum = {name: whole(saved[f"{OUTER}{name}.momentum"]) for name in parameters}
    return {
        "weights": error(weights, wanted.weights[mesh.replica_rank]),
        "anchors": error(anchors, wanted.anchors),
        "momentum": error(momentum, wanted.momentum),
    }


def local_cell(world_size: int, shard: int, model: str = "gpt", **strategy: Any) -> Cell:
    strategy = {"local_steps": LOCAL_STEPS, "outer_lr": LR, "outer_momentum": MOMENTUM, "shard": shard} | strategy
    optim = {"warmup_steps": 2, "clip_norm": CLIP_NORM, "lr": 1e-2}
    return Cell(world_size, model, strategy=strategy, optim=optim, batch={"micro_size": 1})


TWO = [local_cell(2, 1, dp=2), local_cell(2, 1, dp=2, data_parallel="zero3")]
FOUR = [
    local_cell(4, 1, dp=4, data_parallel="allreduce"),
    local_cell(4, 2, dp=4, data_parallel="allreduce"),
    local_cell(4, 2, dp=4),
    local_cell(4, 2, dp=4, data_parallel="zero1"),
    local_cell(4, 2, dp=4, data_parallel="zero2"),
    local_cell(4, 2, dp=4, data_parallel="zero3"),
    local_cell(4, 1, dp=2, tp=2, data_parallel="allreduce"),
    local_cell(4, 1, dp=2, tp=2, data_parallel="zero3"),
    local_cell(4, 1, dp=2, pp=2, data_parallel="allreduce", schedule="1f1b"),
    local_cell(4, 2, dp=2, cp=2, data_parallel="allreduce"),
    local_cell(4, 2, "gpt-moe-additive", dp=4, ep=2, data_parallel="zero3"),
]
EIGHT = [
    local_cell(8, 2, dp=4, pp=2, data_parallel="zero2", schedule="1f1b"),
    local_cell(8, 2, dp=4, tp=2, data_parallel="zero3"),
]


@pytest.mark.parametrize(
    ("world_size", "cells"),
    [(2, TWO), (4, FOUR), pytest.param(8, EIGHT, marks=pytest.mark.long_form(30))],
    ids=["two", "four", "eight"],
)
def test_replicas_train_as_in_one_process(world_size: int, cells: list[Cell]) -> None:
    ranks = run_on_world(world_size, against_one_process, cells, timeout=280)
    for cell, of_ranks in zip(cells, zip(*ranks, strict=True), strict=True):
        worst = max(max(errors.values()) for errors in of_ranks)
        assert worst < TOLERANCE, (str(cell), of_ranks)


def test_replicas_that_are_left_train_as_in_one_process() -> None:
    cell = local_cell(6, 2, dp=6, data_parallel="zero3")
    *left, first_lost, second_lost = run_ranks(6, go_on_after_a_loss, cell)
    assert first_lost is second_lost is None
    for errors in left:
        assert max(errors.values()) < TOLERANCE, errors


COMMON = (*TINY, "precision=fp64", "train.steps=10", "model.n_layers=2", "+strategy=dp")
LOCAL = (*COMMON, "strategy.local_steps=3", "strategy.shard=1")
SAVED = 4  # steps, one after an outer step


def whole_state(training: Training) -> dict[str, Any]:
    """What a checkpoint of this rank would contain."""
    state = training.state() if training.outer is None else training.outer.saved(training.state())
    return {name: whole(value).tolist() for name, value in state.items()}


def config_of(*overrides: str) -> Config:
    return typed(compose([*overrides]))


def save_and_continue(
    rank: int, world_size: int, folder: str, *overrides: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state after ``SAVED`` steps, which is saved, and after as many more."""
    config = config_of(*overrides)
    training = Training.of(RunDirectory(Path(folder)), config, join_again(config, rank, world_size))
    training.manager.load(None)
    training.steps(0, SAVED)
    training.manager.save(SAVED, {})
    training.manager.close(lambda: False)
    saved = whole_state(training)
    training.steps(SAVED, 2 * SAVED)
    return saved, whole_state(training)


def resume(rank: int, world_size: int, folder: str, steps: int, *overrides: str) -> dict[str, Any]:
    """The state after a resume and ``steps`` steps."""
    config = config_of(*overrides)
    training = Training.resumed(RunDirectory(Path(folder)), config, join_again(config, rank, world_size))
    training.steps(SAVED, SAVED + steps)
    return whole_state(training)


def test_a_checkpoint_between_outer_steps_resumes_with_any_number_of_replicas(tmp_path: Path) -> None:
    ranks = run_on_world(2, save_and_continue, str(tmp_path), *LOCAL)
    (saved, _), _ = ranks
    stored = read_tensors(next((tmp_path / "checkpoints").iterdir()))
    assert {name.split(".")[1] for name in stored if name.startswith("replica.")} == {"0", "1"}
    weight = next(name for name in saved if name.startswith("model."))
    assert ranks[0][0][weight] == ranks[1][0][weight] == stored[weight].tolist()  # the anchors
    names = [f"replica.{replica}.{weight}" for replica in (0, 1)]
    assert not torch.equal(*(stored[name] for name in names))

    again = run_on_world(2, resume, str(tmp_path), SAVED, *LOCAL)
    assert again == [after for _, after in ranks]  # the same bits

    (first, second, third, last) = run_on_world(4, resume, str(tmp_path), 0, *LOCAL)
    assert first[names[0]] == stored[names[0]].tolist()
    assert second[names[1]] == stored[names[1]].tolist()
    moment = next(name for name in stored if name.startswith("optim.") and name.endswith("exp_avg"))
    for number, state in ((2, third), (3, last)):  # new replicas
        assert state[f"replica.{number}.{weight}"] == stored[weight].tolist()
        assert state[f"replica.{number}.{moment}"] == stored[moment].tolist()

    (alone,) = run_on_world(1, resume, str(tmp_path), 0, *LOCAL)
    assert alone[names[0]] == stored[names[0]].tolist()
    (synchronous,) = run_on_world(1, resume, str(tmp_path), 0, *COMMON)
    assert synchronous[weight] == stored[weight].tolist()
    assert synchronous[moment] == stored[moment].tolist()


def test_local_steps_continue_from_a_synchronous_checkpoint(tmp_path: Path) -> None:
    ((saved, _),) = run_on_world(1, save_and_continue, str(tmp_path), *COMMON)
    moments = {name for name in saved if name.startswith("optim.")}
    for replica, state in enumerate(run_on_world(2, resume, str(tmp_path), 0, *LOCAL)):
        for name, value in saved.items():
            local_name = f"replica.{replica}.{name}" if replica > 0 and name in moments else name
            assert state[local_name] == value, local_name


def without_the_newest_outer_step(rank: int, world_size: int, folder: str) -> list[dict[str, Any]]:
    """The state of this rank after an outer step, and after the second rank has lost it and ``go_on`` was called."""
    config = config_of(*LOCAL)
    mesh = join_again(config, rank, world_size)
    training = Training.of(RunDirectory(Path(folder, str(rank))), config, mesh)
    training.manager.load(None)
    training.steps(0, 3)
    states = [whole_state(training)]
    outer = training.outer
    assert outer is not None
    if rank == 1:
        outer._taken -= 1
        for tensor in training.state().values():
            tensor.add_(1.0)
        for tensor in outer.saved({}).values():
            tensor.add_(1.0)
    outer.go_on(mesh, 3, last=False)
    return [*states, whole_state(training)]


def test_a_replica_that_lacks_the_newest_outer_step_continues_from_its_anchors(tmp_path: Path) -> None:
    first, second = run_on_world(2, without_the_newest_outer_step, str(tmp_path))
    assert first[0] == first[1]
    shared = {name for name in first[0] if name.startswith(("model.", "outer."))}
    assert shared and {name: second[1][name] for name in shared} == {name: first[0][name] for name in shared}


def final_weights(rank: int, world_size: int, folder: str, *overrides: str) -> dict[str, Any]:
    config = config_of(*overrides)
    training = Training.of(RunDirectory(Path(folder, str(rank))), config, join_again(config, rank, world_size))
    training.manager.load(None)
    training.steps(0, SAVED)
    return {name: whole(value).tolist() for name, value in training.engine.named_parameters().items()}


def test_an_average_after_each_step_of_sgd_is_synchronous_training(tmp_path: Path) -> None:
    sgd = (*COMMON, "optim=sgd", "optim.clip_norm=0", "model.dropout=0")
    averaging = ("strategy.local_steps=1", "strategy.shard=1", "strategy.outer_lr=1", "strategy.outer_momentum=0")
    expected, _ = run_on_world(2, final_weights, str(tmp_path / "synchronous"), *sgd)
    for found in run_on_world(2, final_weights, str(tmp_path / "local"), *sgd, *averaging):
        wanted = {name: torch.tensor(value) for name, value in expected.items()}
        assert error({name: torch.tensor(value) for name, value in found.items()}, wanted) < TOLERANCE


def test_a_run_goes_on_with_the_replicas_that_are_left(tmp_path: Path) -> None:
    overrides = ("+strategy=dp", "strategy.local_steps=3", "strategy.shard=1", "train.eval_every=4")
    run = frozen(tmp_path / "run", *overrides)
    assert run_attempt(run, workers=4) == [Exit.DONE] * 4
    lines = run.read_metrics()
    assert [line.step for line in lines if line.get("val_loss") is not None] == [4, 8, 10]
    run = frozen(tmp_path / "run", *overrides, "train.steps=14")
    assert run_attempt(run, workers=2) == [Exit.DONE] * 2
    lines = run.read_metrics()
    assert [line.step for line in lines] == [*range(1, 15)]
    assert lines[-1]["loss"] < lines[0]["loss"]


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ({"dp": 4, "local_steps": 2}, "all ranks one replica"),
        ({"dp": 4, "local_steps": 2, "shard": 3}, "does not divide"),
        ({"dp": 2, "cp": 2, "local_steps": 2, "shard": 1}, "context-parallel ranks"),
    ],
)
def test_the_ranks_of_a_replica_must_be_known(strategy: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Cell(4, strategy=strategy).layout()


def values_after(rank: int, world_size: int, folder: str, overrides: list[str]) -> list[dict[str, Any]]:
    """The parameters and buffers of this rank after an outer step, and after one more step."""
    config = config_of(*overrides)
    training = Training.of(RunDirectory(Path(folder, str(rank))), config, join_again(config, rank, world_size))
    training.manager.load(None)
    found = []
    for first, last in ((0, 3), (3, 4)):
        training.steps(first, last)
        values = {**training.engine.named_parameters(), **training.engine.named_buffers()}
        found.append({name: whole(value).tolist() for name, value in values.items()})
    return found


@pytest.mark.parametrize(
    "overrides",
    [
        ["precision=bf16", "precision.weights=bf16"],
        ["model.moe.experts=4", "model.moe.top_k=2", "model.moe.router=sigmoid", "model.moe.bias_rate=0.1"],
    ],
    ids=["masters", "buffers"],
)
def test_all_replicas_have_equal_values_after_an_outer_step(tmp_path: Path, overrides: list[str]) -> None:
    first, second = run_on_world(2, values_after, str(tmp_path), [*LOCAL, *overrides])
    assert first[0] == second[0]
    assert first[1] != second[1]
