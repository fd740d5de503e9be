"""Training on mixtures, streams and own batches: fp64 losses and weights of one process under 1, 2 and 4 ranks, with
stops between them. Steps, batches and ranks do not divide each other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from hpc_train.bench.step_worker import StepBench
from hpc_train.config.schema import (
    BatchConfig,
    Config,
    CustomDataConfig,
    CustomModelConfig,
    DataConfig,
    GPTConfig,
    MixtureDataConfig,
    PrecisionConfig,
    StrategyConfig,
    StreamDataConfig,
    TrainConfig,
)
from hpc_train.data.build import build_dataset
from hpc_train.data.feed import TrainFeed
from hpc_train.data.sampler import Skipped
from hpc_train.data.stream import States
from hpc_train.parallel.build import build_engine
from hpc_train.run.requests import StopFlag
from hpc_train.train.data_progress import positions
from hpc_train.train.guard import LossCheck, check_loss
from tests.checkpoint.training import join_again
from tests.data.descent import Weights, descent, tensors_of, weights_of
from tests.parallel.oracle import error
from tests.ranks import run_on_world

RATE, GLOBAL_SIZE = 0.1, 10


class Words:
    """Windows of a short text as tokens below 16: map-style, or one shard of a stream with or without its state."""

    def __init__(self, split: str, offset: int = 0, size: int = 23, shard: int = 0, shards: int = 1) -> None:
        self.offset, self.size, self.place, self.shards = offset, size, shard, shards

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if index >= self.size:
            raise IndexError(index)
        tokens = np.random.default_rng(100 * self.offset + index).integers(16, size=9)
        return tokens[:-1], tokens[1:]

    def __iter__(self) -> Any:
        while self.place < self.size:
            self.place += self.shards
            yield self[self.place - self.shards]


class Resuming(Words):
    def state_dict(self) -> int:
        return self.place

    def load_state_dict(self, state: int) -> None:
        self.place = state


def data(name: str) -> DataConfig:
    words = f"{__name__}.Words"
    sources = {
        each: {"kind": "custom", "_target_": words, "args": {"offset": number, "size": 7 + 20 * number}}
        for number, each in enumerate(("few", "many"))
    }
    example = "examples.own_collate"
    found: dict[str, DataConfig] = {
        "mixture": MixtureDataConfig(sources=sources, weights={"few": 1, "many": 2}),
        "stream": StreamDataConfig(_target_=f"{__name__}.Resuming", shards=4),
        "stream that is read again": StreamDataConfig(_target_=words, shards=3),
        "stream that ends": StreamDataConfig(_target_=words, args={"size": 66}, shards=4, repeat=False),
        "collate": CustomDataConfig(
            _target_=f"{example}.Purchases", args={"customers": 35}, collate=f"{example}.with_negatives"
        ),
    }
    return found[name]


def config_of(name: str, world_size: int) -> Config:
    gpt = GPTConfig(vocab_size=16, dim=16, n_layers=1, n_heads=2, n_kv_heads=2, ffn_dim=24)
    own = CustomModelConfig(_target_="examples.own_collate.Recommender", args={"width": 8})
    return Config(
        strategy=StrategyConfig(dp=world_size),
        model=own if name == "collate" else gpt,
        data=data(name),
        precision=PrecisionConfig(name="fp64"),
        batch=BatchConfig(global_size=GLOBAL_SIZE, micro_batches=2, loader_workers=0),
        train=TrainConfig(seed=3, steps=20),
    )


def train_part(
    rank: int, world_size: int, name: str, weights: Weights, start: int, steps: int, states: States
) -> tuple[list[float], Weights, States]:
    """Returns the losses of some steps of plain gradient descent, and what a checkpoint after them would hold."""
    config = config_of(name, world_size)
    mesh = join_again(config, rank, world_size)
    engine = build_engine(config, mesh)
    parameters = engine.named_parameters()
    with torch.no_grad():
        for key, value in weights.items():
            parameters[key].copy_(torch.from_numpy(value))
    dataset = build_dataset(config.data, "train", 3)
    feed = TrainFeed(
        dataset, config.batch, mesh.layout, mesh.dp_rank, 5, mesh.device, start, 1, Skipped(((3, 4),)), states
    )
    losses = [loss for _, loss in descent(engine, feed, mesh, range(start, start + steps), RATE)]
    state = positions(feed, start + len(losses), mesh).get("stream", {})
    return losses, weights_of(engine), state


def train(name: str, plan: Sequence[tuple[int, int]]) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses: list[float] = []
    weights: Weights = {}
    states: States = {}
    for world_size, steps in plan:
        parts = run_on_world(world_size, train_part, name, weights, len(losses), steps, states)
        found, weights, states = parts[0]
        states = json.loads(json.dumps(states))
        losses += found
    return losses, tensors_of(weights)


@cache
def one_process(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    return train(name, [(1, 8)])


@pytest.mark.long_form(5, cases=["stream that is read again", "stream that ends", "collate"])
@pytest.mark.parametrize("name", ["mixture", "stream", "stream that is read again", "stream that ends", "collate"])
def test_ranks_and_stops_change_nothing(name: str) -> None:
    expected, weights = one_process(name)
    assert len(expected) == (6 if name == "stream that ends" else 8)
    losses, found = train(name, [(2, 2), (4, 3), (1, 1), (2, 2)])
    assert losses == pytest.approx(expected, rel=1e-12) and error(found, weights) < 1e-10


def measures_of_several_inputs(rank: int, world_size: int) -> tuple[Any, LossCheck]:
    """The shape of a sample in ``bench step``, and what was found about the loss."""
    config = config_of("collate", world_size)
    bench = StepBench(config, join_again(config, rank, world_size), StopFlag())
    dataset = build_dataset(config.data, "train", 3)
    return bench.inputs_shape(), check_loss(bench.engine, dataset, bench.mesh, "fp64")


def test_a_dict_of_inputs_is_measured_and_its_loss_checked() -> None:
    assert run_on_world(1, measures_of_several_inputs) == [(None, LossCheck())]
