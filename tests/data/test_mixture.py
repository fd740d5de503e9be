"""Mixtures: the share of each source, and the same global batches under any number of ranks and after a restart."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from hpc_train.config.schema import BatchConfig, MixtureDataConfig
from hpc_train.data.build import build_dataset
from hpc_train.data.dataset import Sample
from hpc_train.data.feed import EvalFeed, LocalBatch, TrainFeed
from hpc_train.data.mixture import MixtureDataset, counts, picks, shares_of
from hpc_train.data.sampler import Skipped
from hpc_train.errors import UserError
from tests.data.layouts import replicas
from tests.data.stand_ins import Numbers

CPU = torch.device("cpu")
WEIGHTS = {"a": 6.0, "b": 3.0, "c": 1.0}


class Hundreds(Numbers):
    """Sample i is i plus a multiple of 100, which tells the source; the context tells its epoch."""

    def __init__(self, samples: int, hundred: int) -> None:
        super().__init__(samples)
        self._offset = 100 * hundred

    def sample(self, index: int, epoch: int) -> Sample:
        sample = super().sample(index, epoch)
        return Sample(sample.inputs + self._offset, sample.targets + self._offset, sample.context)


def mixture() -> MixtureDataset:
    return MixtureDataset({"a": Hundreds(40, 0), "b": Hundreds(7, 1), "c": Hundreds(90, 2)}, WEIGHTS)


def feed(dp: int = 1, rank: int = 0, start: int = 0, workers: int = 0, skipped: Skipped | None = None) -> TrainFeed:
    config = BatchConfig(global_size=10, loader_workers=workers)
    return TrainFeed(mixture(), config, replicas(dp, 10, 2), rank, 5, CPU, start, 1, skipped or Skipped())


def read(batches: list[LocalBatch]) -> list[tuple[int, int]]:
    """Returns the samples of a global batch with their epochs, in order, without padding."""
    micros = [micro for batch in batches for micro in batch.micro_batches]
    columns = [(micro.targets[:, 0].tolist(), micro.context["epoch"].tolist()) for micro in micros]
    pairs = [pair for targets, epochs in columns for pair in zip(targets, epochs, strict=True)]
    return [pair for pair in pairs if pair[0] >= 0]


def test_the_order_is_that_of_always_taking_the_source_whose_turn_is_next() -> None:
    random = np.random.default_rng(0)
    for sources in (1, 2, 5):
        shares = shares_of((random.random(sources) ** 3 + 1e-3).tolist())
        taken, expected = np.zeros(sources, np.int64), []
        for _ in range(400):
            source = int(np.lexsort((np.arange(sources), (taken + 0.5) / shares))[0])
            expected.append((source, int(taken[source])))
            taken[source] += 1
        for first, last in ((0, 400), (0, 1), (37, 391), (250, 250)):
            assert list(zip(*map(np.ndarray.tolist, picks(shares, first, last)), strict=True)) == expected[first:last]
        assert counts(shares, 123).tolist() == [sum(s == each for s, _ in expected[:123]) for each in range(sources)]


def test_shares_hold_in_each_global_batch_and_far_into_a_run() -> None:
    shares = shares_of([6, 3, 1])
    for first in (0, 10, 10**9):
        assert np.bincount(picks(shares, first, first + 10)[0]).tolist() == [6, 3, 1]


@pytest.mark.parametrize(("workers", "plan"), [(0, [(2, 3), (4, 5), (3, 4)]), (1, [(2, 2), (3, 2)])])
def test_other_numbers_of_ranks_go_on_in_the_same_order(workers: int, plan: list[tuple[int, int]]) -> None:
    one = feed()
    expected = [read([next(one)]) for _ in range(sum(steps for _, steps in plan))]
    found: list[list[tuple[int, int]]] = []
    for dp, steps in plan:
        ranks = [feed(dp, rank, len(found), workers) for rank in range(dp)]
        found += [read([next(rank) for rank in ranks]) for _ in range(steps)]
        for rank in ranks:
            rank.close()
    assert found == expected


def test_each_source_has_its_own_epochs() -> None:
    one = feed()
    seen = [pair for _ in range(12) for pair in read([next(one)])]
    for hundred, size in ((0, 40), (1, 7), (2, 90)):
        own = [(value % 100, epoch) for value, epoch in seen if value // 100 == hundred]
        assert [epoch for _, epoch in own] == [number // size for number in range(len(own))]
        epochs = [[index for index, epoch in own if epoch == each] for each in {epoch for _, epoch in own}]
        assert all(len(set(each)) == len(each) for each in epochs)
    b = [[value for value, epoch in seen if value // 100 == 1 and epoch == each] for each in (0, 1)]
    assert sorted(b[0]) == sorted(b[1]) == list(range(100, 107)) and b[0] != b[1]


def test_the_share_that_was_seen_leaves_out_what_was_skipped() -> None:
    skipped = Skipped(((2, 5),))
    steps = feed(skipped=skipped)
    found = Counter(value // 100 for _ in range(6) for value, _ in read([next(steps)]))
    seen = steps.seen(6)
    assert {name: one.samples for name, one in seen.items()} == {"a": found[0], "b": found[1], "c": found[2]}
    assert seen["a"].share == 0.6 and seen["b"].epochs == pytest.approx(18 / 7)
    assert steps.seen(0)["a"].samples == 0


def test_validation_reads_each_sample_of_each_source_once() -> None:
    batches = list(EvalFeed(mixture(), BatchConfig(global_size=10, loader_workers=0), replicas(1, 10), 0, CPU))
    values = [value for batch in batches for value, _ in read([batch])]
    assert sorted(values) == [*range(40), *range(100, 107), *range(200, 290)]


def test_sources_from_a_config_by_size() -> None:
    synthetic = {"kind": "synthetic", "sequence_length": 4}
    sources = {"one": synthetic | {"samples": 30}, "two": synthetic | {"samples": 10}}
    dataset = build_dataset(MixtureDataConfig(sources=sources), "train", 0)
    assert isinstance(dataset, MixtureDataset) and dataset.loads_cheaply
    assert dataset.shares.tolist() == [0.75, 0.25] and len(dataset) == 40
    assert dataset.describe(40 + 33) == "sample 3 (computed) of the source two"
    with pytest.raises(UserError, match="the source two has no samples"):
        MixtureDataset({"one": Numbers(1), "two": Numbers(0)}, {})
