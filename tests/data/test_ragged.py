"""Batches without one row per item: graphs in one object, images of any size with any number of boxes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpc_train.config.compose import typed
from hpc_train.config.schema import (
    BatchConfig,
    Config,
    CustomDataConfig,
    CustomModelConfig,
    GPTConfig,
    PrecisionConfig,
    StrategyConfig,
    TrainConfig,
)
from hpc_train.data.build import build_dataset
from hpc_train.data.dataset import Ragged, StepBatch, moved
from hpc_train.data.feed import EvalFeed, TrainFeed
from hpc_train.errors import UserError
from hpc_train.layout.resolve import resolve_layout
from hpc_train.models.build import build_model
from hpc_train.parallel.build import build_engine
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import freeze
from hpc_train.train.evaluation import evaluate
from tests.checkpoint.training import join_again
from tests.config.composing import compose
from tests.data.descent import descent, tensors_of, weights_of
from tests.data.layouts import replicas
from tests.parallel.oracle import error
from tests.ranks import run_on_world
from tests.train.runs import TINY, run_attempt

RATE, GLOBAL_SIZE, STEPS = 0.05, 5, 4


class Graphs:
    """Graph i has 2 + i % 5 nodes in a ring, and one of three classes."""

    def __init__(self, split: str) -> None:
        pass

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        nodes = 2 + index % 5
        ring = torch.arange(nodes)
        features = torch.from_numpy(np.random.default_rng(index).normal(size=(nodes, 4)))
        return features, torch.stack((ring, ring.roll(1))), index % 3


class GraphBatch:
    """Several graphs in one, as torch_geometric's ``Batch``."""

    def __init__(self, features: Tensor, edges: Tensor, graph: Tensor, classes: Tensor) -> None:
        self.features, self.edges, self.graph, self.classes = features, edges, graph, classes

    def to(self, device: torch.device) -> GraphBatch:
        return GraphBatch(*(value.to(device) for value in vars(self).values()))


def joined(items: list[Any]) -> Ragged:
    sizes = [len(features) for features, _, _ in items]
    starts = np.cumsum([0, *sizes[:-1]])
    edges = torch.cat([each + int(start) for start, (_, each, _) in zip(starts, items, strict=True)], 1)
    features = torch.cat([each for each, _, _ in items])
    graph = torch.repeat_interleave(torch.arange(len(items)), torch.tensor(sizes))
    return Ragged(GraphBatch(features, edges, graph, torch.tensor([each for _, _, each in items])))


class GraphNet(nn.Module):
    """Classifies graphs; a graph weighs as many nodes as it has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.head = nn.Linear(4, 3)

    def forward(self, batch: GraphBatch) -> Tensor:
        hidden = batch.features
        for layer in self.layers:
            source, target = batch.edges
            hidden = hidden + torch.zeros_like(hidden).index_add(0, target, layer(hidden)[source].tanh())
        graphs = int(batch.graph[-1]) + 1
        return self.head(hidden.new_zeros(graphs, 4).index_add(0, batch.graph, hidden))

    def loss(self, outputs: Tensor, batch: GraphBatch) -> tuple[Tensor, Tensor]:
        nodes = batch.graph.bincount().to(outputs.dtype)
        return (F.cross_entropy(outputs, batch.classes, reduction="none") * nodes).sum(), nodes.sum()


class Pictures:
    """Picture i is 3 x (4 + i % 3) x 5 pixels and has i % 4 boxes."""

    def __init__(self, split: str) -> None:
        pass

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        draw = np.random.default_rng(index)
        boxes = torch.from_numpy(draw.normal(size=(index % 4, 4)))
        return torch.from_numpy(draw.normal(size=(3, 4 + index % 3, 5))), {"boxes": boxes, "name": f"picture {index}"}


def listed(items: list[Any]) -> Ragged:
    return Ragged([picture for picture, _ in items], [target for _, target in items])


class Detector(nn.Module):
    """Predicts one box per picture, and learns from all boxes that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6, 4)

    def forward(self, pictures: list[Tensor]) -> list[Tensor]:
        return [self.head(self.body(picture[None]).tanh().mean((2, 3))) for picture in pictures]

    def loss(self, outputs: list[Tensor], targets: list[dict[str, Any]]) -> tuple[Tensor, float]:
        pairs = list(zip(outputs, (each["boxes"] for each in targets), strict=True))
        return torch.stack([(box - boxes).abs().sum() for box, boxes in pairs]).sum(), sum(len(b) for _, b in pairs)


TASKS = {"graphs": ("Graphs", "joined", "GraphNet"), "boxes": ("Pictures", "listed", "Detector")}


def config_of(task: str, **strategy: Any) -> Config:
    dataset, collate, model = TASKS[task]
    micro_batches, reproducible = strategy.pop("micro_batches", "auto"), strategy.pop("reproducible", None)
    return Config(
        strategy=StrategyConfig(**strategy),
        model=CustomModelConfig(_target_=f"{__name__}.{model}"),
        data=CustomDataConfig(_target_=f"{__name__}.{dataset}", collate=f"{__name__}.{collate}"),
        precision=PrecisionConfig(name="fp64"),
        batch=BatchConfig(global_size=GLOBAL_SIZE, micro_batches=micro_batches, loader_workers=0),
        train=TrainConfig(seed=3, steps=STEPS, reproducible=reproducible),
    )


def plain_loop(task: str, steps: int = STEPS, order: int = 5) -> tuple[list[float], dict[str, Tensor], float]:
    """The losses and weights of gradient descent in plain torch, and the loss of an evaluation of all items."""
    config = config_of(task)
    module: Any = build_model(config.model, 3).bare.double()  # type: ignore[union-attr]
    dataset = build_dataset(config.data, "train", 3)
    feed = TrainFeed(dataset, config.batch, replicas(1, GLOBAL_SIZE, 1), 0, order, torch.device("cpu"), 0)
    collate = globals()[TASKS[task][1]]
    losses = []
    for _ in range(steps):
        (micro,) = next(feed).micro_batches
        batch = collate([dataset.item(index, 0) for index in micro.samples])
        total, count = module.loss(module(batch.inputs), batch.inputs if batch.targets is None else batch.targets)
        loss = total / count
        gradients = torch.autograd.grad(loss, [*module.parameters()])
        losses.append(loss.item())
        with torch.no_grad():
            for value, gradient in zip(module.parameters(), gradients, strict=True):
                value.add_(gradient, alpha=-RATE)
    batch = collate([dataset.item(index, 0) for index in range(len(dataset))])
    total, count = module.loss(module(batch.inputs), batch.inputs if batch.targets is None else batch.targets)
    return losses, {name: value.detach() for name, value in module.named_parameters()}, (total / count).item()


def trained(rank: int, world_size: int, cases: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    found = []
    for task, strategy in cases:
        config = config_of(task, **strategy)
        mesh = join_again(config, rank, world_size)
        engine = build_engine(config, mesh)
        dataset = build_dataset(config.data, "train", 3)
        feed = TrainFeed(dataset, config.batch, mesh.layout, mesh.dp_rank, 5, mesh.device, 0)
        losses, empty = [], 0
        for batch, loss in descent(engine, feed, mesh, range(STEPS), RATE):
            empty += sum(micro.inputs.items == 0 for micro in batch.micro_batches)
            losses.append(loss)
        numbers = evaluate(engine, EvalFeed(dataset, config.batch, mesh.layout, mesh.dp_rank, mesh.device))
        assert numbers is not None and numbers.accuracy is None
        found.append((losses, weights_of(engine), numbers.loss, empty))
    return found


@pytest.mark.parametrize("task", TASKS)
def test_ranks_and_micro_batches_change_nothing(task: str) -> None:
    """Five items on two ranks in three micro-batches each: one has no item."""
    losses, weights, evaluation = plain_loop(task)
    splits: list[dict[str, Any]] = [
        {"dp": 2},
        {"dp": 2, "data_parallel": "zero3", "micro_batches": 3},
        {"dp": 2, "data_parallel": "allreduce", "micro_batches": 3},
        {"dp": 2, "reproducible": "any_world_size"},
    ]
    found = run_on_world(2, trained, [(task, split) for split in splits])
    for split, *of_ranks in zip(splits, *found, strict=True):
        for found_losses, found_weights, found_evaluation, _ in of_ranks:
            assert found_losses == pytest.approx(losses, rel=1e-12), split
            assert error(tensors_of(found_weights), weights) < 1e-10, split
            assert found_evaluation == pytest.approx(evaluation, rel=1e-12), split
        assert sum(empty for *_, empty in of_ranks) > 0 or "micro_batches" not in split, split


@pytest.mark.long_form(10)
def test_a_run_is_checked_evaluated_and_resumed_under_another_strategy(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    own = [each for each in TINY if not each.startswith(("model.", "data", "train.steps", "batch."))]
    own += ["model=custom", f"model._target_={__name__}.GraphNet", "precision=fp64", "batch.global_size=5"]
    own += ["data=custom", f"data._target_={__name__}.Graphs", f"data.collate={__name__}.joined", "train.seed=3"]
    own += ["optim=sgd", f"optim.lr={RATE}", "optim.momentum=0", "optim.weight_decay=0", "optim.warmup_steps=0"]
    for strategy, steps in (("zero3", 3), ("dp", 5)):
        overrides = [f"+strategy={strategy}", f"train.steps={steps}", "optim.schedule=constant"]
        freeze(typed(compose([*own, *overrides])), run)
        assert run_attempt(run, 2) == [0, 0]
    losses = [line["loss"] for line in run.read_metrics()]
    assert losses == pytest.approx(plain_loop("graphs", 5, 3)[0], rel=1e-10) and len(losses) == 5
    said = [event["message"] for event in run.read_events() if event["event"] == "warning"]
    assert [message for message in said if not message.startswith("continues with changed settings")] == []


class Wide(NamedTuple):
    rows: Tensor
    names: list[str]


@dataclass(frozen=True)
class Packed:
    tokens: Tensor
    parts: list[Any]


def test_tensors_are_moved_wherever_they_are() -> None:
    where = torch.device("meta")
    value = Packed(torch.zeros(2), [{"a": torch.ones(1)}, (Wide(torch.ones(1), ["x"]), 3, None, "text")])
    found = moved(value, where)
    assert found.tokens.is_meta and found.parts[0]["a"].is_meta and found.parts[1][0].rows.is_meta
    assert found.parts[1][0].names == ["x"] and found.parts[1][1:] == (3, None, "text")
    ragged = Ragged(GraphBatch(*torch.ones(4, 1)), items=2).to(where)
    assert ragged.inputs.edges.is_meta and ragged.targets is ragged.inputs and ragged.items == 2


def changing(items: list[Any]) -> Ragged:
    ragged = joined(items)
    ragged.inputs.features = ragged.inputs.features + changing.calls  # type: ignore[attr-defined]
    changing.calls += 1  # type: ignore[attr-defined]
    return ragged


changing.calls = 0  # type: ignore[attr-defined]


def refused(rank: int, world_size: int, config: Config) -> str:
    """The message of the first step."""
    mesh = join_again(config, rank, world_size)
    engine = build_engine(config, mesh)
    dataset = build_dataset(config.data, "train", 3)
    batch = next(TrainFeed(dataset, config.batch, mesh.layout, mesh.dp_rank, 5, mesh.device, 0))
    with pytest.raises(UserError) as error:
        engine.train_step(0, StepBatch(batch.micro_batches, GLOBAL_SIZE))
    return str(error.value)


def test_what_needs_rows_is_refused_by_name() -> None:
    gpt = GPTConfig(vocab_size=16, dim=16, n_layers=2, n_heads=2, n_kv_heads=2, ffn_dim=24)
    for strategy in ({"dp": 2}, {"pp": 2, "schedule": "1f1b", "micro_batches": 2}, {"tp": 2}, {"cp": 2}):
        config = replace(config_of("graphs", **strategy), model=gpt)
        assert resolve_layout(config, 1, 2).world_size == 2
        for message in run_on_world(2, refused, config):
            assert "data.collate returns Ragged" in message and "pipelines, tensor and context" in message, strategy
    head = CustomModelConfig(_target_="torch.nn.Linear", args={"in_features": 4, "out_features": 3})
    (message,) = run_on_world(1, refused, replace(config_of("graphs"), model=head))
    assert "but Linear has no method loss" in message
    config = config_of("graphs")
    config.data.collate = f"{__name__}.changing"
    feed = TrainFeed(
        build_dataset(config.data, "train", 3), config.batch, replicas(1, 5, 1), 0, 5, torch.device("cpu"), 0
    )
    with pytest.raises(UserError, match="returned two different batches for the same items"):
        next(feed)
