"""Samples of uneven length: none is lost, ranks get equally many tokens, and little is padding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train.config.schema import BatchConfig, CustomDataConfig
from hpc_train.data.build import build_dataset
from hpc_train.data.dataset import IGNORED, Dataset, Indices, Sample, SampleError
from hpc_train.data.feed import EvalFeed, LocalBatch, TrainFeed
from hpc_train.data.sampler import PADDING, WIDTHS, BatchRow, Order, TokenBalance, pad_or_truncate
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout
from tests.checkpoint.progress import LONG
from tests.data.layouts import replicas

CPU = torch.device("cpu")


def lengths_of(samples: int, seed: int = 0) -> Indices:
    return np.random.default_rng(seed).geometric(1 / 60, size=samples)


def divided(order: Order, step: int, layout: Layout, lengths: Indices) -> list[list[BatchRow]]:
    balance = TokenBalance(lengths, layout)
    return [balance.rank_batch(order, step, rank) for rank in range(layout.dp)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Order, Layout]:
    samples, global_size = draw(st.integers(1, 200)), draw(st.integers(1, 48))
    order = Order(samples, global_size, draw(st.booleans()) and samples >= global_size, draw(st.integers(0, 9)))
    layout = replicas(draw(st.integers(1, global_size)), global_size, draw(st.integers(1, 5)))
    return order, replace(layout, pp=draw(st.sampled_from([1, 2])), tp=draw(st.sampled_from([1, 2, 4])))


@settings(deadline=None, max_examples=150 if LONG else 20)
@given(case=cases(), step=st.integers(0, 20))
def test_a_step_has_the_same_samples_on_any_ranks_and_shapes_agree(case: tuple[Order, Layout], step: int) -> None:
    order, layout = case
    lengths = lengths_of(order.samples)
    ranks = divided(order, step, layout, lengths)
    slots = np.concatenate([row.slots for rank in ranks for row in rank])
    expected = order.slots(step, 0, order.global_size)
    assert sorted(slots[slots != PADDING]) == sorted(expected[expected != PADDING])
    assert {len(row.slots) for rank in ranks for row in rank} == {layout.micro_size}
    assert len({tuple(row.width for row in rank) for rank in ranks}) == 1, "all ranks compute with the same shapes"
    for row in (row for rank in ranks for row in rank):
        assert row.width % layout.tp == 0
        assert all(lengths[index] <= row.width for index in row.slots if index != PADDING)
    if layout.pp > 1:
        assert len({row.width for row in ranks[0]}) == 1


@pytest.mark.parametrize("dp", [2, 4, 8])
def test_ranks_get_equally_many_tokens_and_little_is_padding(dp: int) -> None:
    lengths, order = lengths_of(4000), Order(4000, 128, True, 7)
    layout = replicas(dp, 128, 4)
    widths, spread, plain_spread = set(), [], []
    for step in range(20):
        ranks = divided(order, step, layout, lengths)
        tokens = [sum(int(lengths[row.slots].sum()) for row in rank) for rank in ranks]
        plain = [int(lengths[order.rank_batch(step, layout, rank)].sum()) for rank in range(dp)]
        spread.append(max(tokens) / min(tokens))
        plain_spread.append(max(plain) / min(plain))
        slots = sum(row.width * len(row.slots) for rank in ranks for row in rank)
        longest = max(int(lengths[row.slots].max()) for rank in ranks for row in rank)
        assert slots < 0.6 * 128 * longest  # what padding to the longest of the step would take
        widths |= {row.width for row in ranks[0]}
    assert max(spread) < 1.06 and np.mean(plain_spread) > 1.1
    assert len(widths) <= WIDTHS


def test_micro_batches_of_a_pipeline_get_equally_many_tokens() -> None:
    lengths, order = lengths_of(4000), Order(4000, 128, True, 7)
    ranks = divided(order, 3, replace(replicas(2, 128, 8), pp=2), lengths)
    tokens = [int(lengths[row.slots].sum()) for rank in ranks for row in rank]
    assert len(tokens) == 16 and max(tokens) / min(tokens) < 1.1


def test_a_sample_is_padded_or_cut_to_a_width() -> None:
    sample = Sample(np.arange(1, 4), np.array([2, 3, IGNORED]), {"mask": np.ones(3, bool), "task": np.array(7)})
    wide = pad_or_truncate(sample, 5)
    assert wide.inputs.tolist() == [1, 2, 3, 0, 0] and wide.targets.tolist() == [2, 3, *[IGNORED] * 3]
    assert wide.context["mask"].tolist() == [True] * 3 + [False] * 2 and wide.context["task"] == 7
    assert pad_or_truncate(sample, 2).targets.tolist() == [2, 3]
    with pytest.raises(ValueError, match="targets after its first 1 tokens"):
        pad_or_truncate(sample, 1)


class Growing:
    """A user's dataset, nothing of ours: item i has i + 1 tokens, all of them i."""

    def __init__(self, split: str, wrong: bool = False, samples: int = 30) -> None:
        self.lengths = [1] * samples if wrong else list(range(1, samples + 1))
        if wrong and split == "validation":
            self.lengths = self.lengths[1:]

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[list[int], list[int]]:
        return [index] * (index + 1), [index] * (index + 1)


def growing(split: str = "train", **args: object) -> Dataset:
    return build_dataset(CustomDataConfig(_target_="tests.data.test_uneven.Growing", args=args), split, 0)


def samples_in(batch: LocalBatch) -> list[int]:
    """Whole samples only: item i stands there i + 1 times."""
    rows = [row[row != IGNORED].tolist() for micro in batch.micro_batches for row in micro.targets]
    assert all(row == [row[0]] * (row[0] + 1) for row in rows if row)
    return [row[0] for row in rows if row]


def test_a_dataset_of_a_user_says_how_long_its_samples_are() -> None:
    config = BatchConfig(global_size=12, loader_workers=0, drop_last=False)
    one = TrainFeed(growing(), config, replicas(1, 12, 3), 0, 5, CPU, 0)
    expected = [sorted(samples_in(next(one))) for _ in range(5)]
    assert sorted(index for batch in expected[:3] for index in batch) == list(range(30))
    for dp, start in ((4, 0), (2, 2), (3, 4)):  # resumed on other ranks
        ranks = [TrainFeed(growing(), config, replicas(dp, 12, 2), rank, 5, CPU, start) for rank in range(dp)]
        batches = [next(rank) for rank in ranks]
        assert sorted(index for batch in batches for index in samples_in(batch)) == expected[start]
        assert len({tuple(micro.inputs.shape for micro in batch.micro_batches) for batch in batches}) == 1
        assert sum(batch.local_count for batch in batches) == sum(index + 1 for index in expected[start])
    validation = [list(EvalFeed(growing(), config, replicas(2, 12, 2), rank, CPU)) for rank in range(2)]
    assert sorted(index for rank in validation for batch in rank for index in samples_in(batch)) == list(range(30))


def test_lengths_that_are_wrong_are_refused() -> None:
    with pytest.raises(UserError, match=r"Growing.lengths has shape \(29,\)"):
        growing("validation", wrong=True)
    feed = TrainFeed(growing(wrong=True), BatchConfig(global_size=8, loader_workers=0), replicas(1, 8), 0, 5, CPU, 0)
    with pytest.raises(SampleError, match="targets after its first 1 tokens"):
        next(feed)
