"""Streams: the same global batches under any number of ranks and after a restart, and how they end."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

from hpc_train.config.schema import BatchConfig, StreamDataConfig
from hpc_train.data import stream
from hpc_train.data.build import build_dataset
from hpc_train.data.dataset import SampleError
from hpc_train.data.feed import EvalFeed, LocalBatch, TrainFeed
from hpc_train.data.sampler import Skipped
from hpc_train.data.stream import States, merged_states
from hpc_train.errors import UserError
from tests.data.layouts import replicas

CPU = torch.device("cpu")


class Numbered:
    """Item k of shard s is 1000 s + k with its epoch; shard s has 5 + 2 s items. ``how`` causes accidents."""

    def __init__(self, split: str, shard: int, shards: int, how: str = "") -> None:
        self.shard, self.how, self.place, self.epoch = shard, how, 0, 0
        self.end = 0 if how == "empty" else 5 + 2 * shard

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        while self.place < self.end:
            value = 1000 * self.shard + self.place
            if self.how == "raises" and value == 1003:
                raise ZeroDivisionError("no such number")
            if self.how != "late":
                self.place += 1
            yield self._item(value)
            if self.how == "late":
                self.place += 1

    def _item(self, value: int) -> Any:
        if self.how == "words":
            return "words"
        noise = float(np.random.random()) + random.random() + float(torch.rand(()))
        return np.array([value]), np.array([value]), {"epoch": np.array(self.epoch), "noise": np.array([noise])}


class Resumable(Numbered):
    def state_dict(self) -> dict[str, Any]:
        return {"place": {self.place} if self.how == "set" else self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Rank:
    """One rank's feed with the state that its checkpoints would hold."""

    def __init__(self, config: StreamDataConfig, dp: int, rank: int, start: int, states: States, **more: Any) -> None:
        more = {"global_size": 6, "loader_workers": 0, "micro_batches": 2, "skipped": Skipped()} | more
        batch = BatchConfig(global_size=more["global_size"], loader_workers=more["loader_workers"])
        layout = replicas(dp, more["global_size"], more["micro_batches"])
        dataset = build_dataset(config, "train", 3)
        self.feed = TrainFeed(dataset, batch, layout, rank, 5, CPU, start, 1, more["skipped"], states)


def config(name: str = "Resumable", shards: int = 4, repeat: bool = True, **args: Any) -> StreamDataConfig:
    return StreamDataConfig(_target_=f"tests.data.test_stream.{name}", args=args, shards=shards, repeat=repeat)


def items(batches: Sequence[LocalBatch]) -> list[tuple[int, int, float]]:
    """Returns the items of a global batch: value, epoch and random number."""
    found = []
    for micro in (micro for batch in batches for micro in batch.micro_batches):
        columns = (micro.targets[:, 0], micro.context["epoch"], micro.context["noise"][:, 0])
        rows = zip(*(column.tolist() for column in columns), strict=True)
        found += [row for row in rows if row[0] >= 0]
    return sorted(found)


Batches = list[list[tuple[int, int, float]]]


def run(config: StreamDataConfig, plan: Sequence[tuple[int, int]], **more: Any) -> Batches:
    """Returns the global batches of a run that goes on for so many steps on so many ranks, stop after stop."""
    batches: Batches = []
    states: States = {}
    for dp, steps in plan:
        ranks = [Rank(config, dp, rank, len(batches), states, **more).feed for rank in range(dp)]
        for _ in range(steps):
            batches.append(items([next(rank) for rank in ranks]))
        states = json.loads(json.dumps(merged_states([rank.state(len(batches)) or {} for rank in ranks])))
        for rank in ranks:
            rank.close()
    return batches


@pytest.fixture
def opened_without_hydra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra takes 10 ms to open a shard, and the cases below open hundreds."""

    def call(config: StreamDataConfig, **given: Any) -> Any:
        return globals()[config._target_.rpartition(".")[2]](**config.args, **given)

    monkeypatch.setattr(stream, "call_target", call)


@cache
def one_rank() -> Batches:
    return run(config(), PLANS["1"])


PLANS = {"1": [(1, 8)], "2, 4, 1, 3": [(2, 2), (4, 2), (1, 1), (3, 3)], "4": [(4, 8)]}


@pytest.mark.usefixtures("opened_without_hydra")
@pytest.mark.parametrize(("shards", "name"), [(1, "Numbered"), (4, "Resumable"), (6, "Numbered"), (6, "Resumable")])
def test_any_number_of_ranks_goes_on_with_the_same_global_batches(name: str, shards: int) -> None:
    expected = run(config(name, shards), PLANS["1"])
    for plan in ("2, 4, 1, 3", "4"):
        assert run(config(name, shards), PLANS[plan]) == expected, plan
    values = [item[:2] for batch in expected for item in batch]
    assert len(values) == len(set(values)) == 8 * 6  # no item twice in an epoch
    first = Counter(value for value, epoch in values if epoch == 0 and value < 5)
    assert len(first) == 5


@pytest.mark.usefixtures("opened_without_hydra")
def test_loader_processes_read_the_same_batches() -> None:
    assert run(config(), [(2, 3), (1, 2)], loader_workers=2) == one_rank()[:5]
    assert run(config(), [(1, 2), (2, 2)], loader_workers=1, micro_batches=1) == one_rank()[:4]


def test_each_item_is_read_once_if_the_ranks_divide_the_shards() -> None:
    states = [Rank(config(), 2, rank, 0, {}).feed for rank in range(2)]
    for rank in states:
        next(rank)
    assert [sorted(rank.state(1) or {}) for rank in states] == [["0", "2"], ["1", "3"]]


def test_a_shard_is_opened_once_for_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    open_shard = stream.StreamReader._reader

    def reader(self: stream.StreamReader, shard: int) -> stream.ShardReader:
        opened.append(shard)
        return open_shard(self, shard)

    monkeypatch.setattr(stream.StreamReader, "_reader", reader)
    feed = Rank(config(), 1, 0, 0, {}, micro_batches=1).feed
    for _ in range(3):
        next(feed)
    assert opened == [0, 1, 2, 3]


def test_skipped_windows_are_left_out() -> None:
    expected = one_rank()
    steps = Rank(config(), 1, 0, 0, {}, skipped=Skipped(((2, 5),))).feed
    assert [items([next(steps)]) for _ in range(5)] == [*expected[:2], *expected[5:8]]


@pytest.mark.usefixtures("opened_without_hydra")
@pytest.mark.parametrize("plan", ["1", "2, 4, 1, 3", "4"])
def test_without_repetition_all_ranks_end_after_the_same_step(plan: str) -> None:
    found = run(config(repeat=False, shards=3), PLANS[plan])
    values = [item[0] for batch in found for item in batch]
    assert sorted(values) == [1000 * shard + place for shard in range(3) for place in range(5 + 2 * shard)]
    last = max(number for number, batch in enumerate(found) if batch)
    assert all(found[: last + 1])
    ranks = [Rank(config(repeat=False, shards=3), 2, rank, 0, {}).feed for rank in range(2)]
    ended = [{next(rank).ended for rank in ranks} == {True} for _ in range(last + 2)]
    assert ended == [False] * (last + 1) + [True] and ranks[0].may_end


class Dividing(Numbered):
    """Divides its items among ranks and loader processes, as webdataset does by default."""

    def __iter__(self) -> Iterator[Any]:
        info, ranks = get_worker_info(), int(os.environ.get("WORLD_SIZE", "2"))
        parts = ranks * (1 if info is None else info.num_workers)
        return (item for number, item in enumerate(super().__iter__()) if number % parts == 0)


def test_an_iterable_that_divides_itself_loses_no_items_in_loader_processes() -> None:
    feed = Rank(config("Dividing", repeat=False), 1, 0, 0, {}, loader_workers=2).feed
    values: list[int] = []
    while not (batch := next(feed)).ended:
        values += [item[0] for item in items([batch])]
    feed.close()
    assert sorted(values) == [1000 * shard + place for shard in range(4) for place in range(5 + 2 * shard)]


class Refusing(Numbered):
    def __iter__(self) -> Iterator[Any]:
        raise ValueError("you need to add an explicit nodesplitter to your input pipeline")


def test_the_splitters_of_webdataset_are_named() -> None:
    with pytest.raises(SampleError, match="nodesplitter=lambda s: s, workersplitter=lambda s: s"):
        next(Rank(config("Refusing"), 1, 0, 0, {}).feed)


def test_validation_keeps_the_first_items_of_all_shards() -> None:
    dataset = build_dataset(replace(config(), validation_samples=7), "validation", 0)
    batches = EvalFeed(dataset, BatchConfig(global_size=4, loader_workers=0), replicas(1, 4), 0, CPU)
    values = [item[0] for batch in batches for item in items([batch])]
    assert sorted(values) == [0, 1, 1000, 1001, 2000, 2001, 3000] and len(dataset) == 7
    assert len(build_dataset(config(shards=2), "validation", 0)) == 12
    with pytest.raises(UserError, match="yields no items for the validation split"):
        build_dataset(config(how="empty"), "validation", 0)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("empty", "shard 0 of tests.data.test_stream.Resumable has no items"),
        ("words", "item 0 of shard 0 of tests.data.test_stream.Resumable is a str, 'words'"),
        ("late", "does not continue where its state_dict says"),
        ("set", "which JSON cannot hold"),
    ],
)
def test_mistakes_are_named_with_the_class_and_the_item(how: str, message: str) -> None:
    feed = Rank(config(how=how), 1, 0, 0, {}).feed
    with pytest.raises(UserError, match=message) as error:
        next(feed)
    assert error.value.fix and error.value.where


def test_an_exception_keeps_its_traceback_without_ours() -> None:
    feed = Rank(config(how="raises"), 1, 0, 0, {}).feed
    with pytest.raises(SampleError, match=r"item 3 in epoch 0 of shard 1 of .*: ZeroDivisionError") as error:
        for _ in range(5):
            next(feed)
    assert "raise ZeroDivisionError" in str(error.value) and "hpc_train/data" not in str(error.value)
