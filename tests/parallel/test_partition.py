"""The partition of blocks against brute force, and what a split promises against torch-free simulation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest

from hpc_train.layout.partition import blocks_of, layers_of, partition, predict
from hpc_train.layout.techniques import SCHEDULES
from hpc_train.parallel.pipeline.split import split_layers


def splits(blocks: int, stages: int) -> Iterator[tuple[range, ...]]:
    for cuts in combinations(range(1, blocks), stages - 1):
        yield tuple(range(first, end) for first, end in pairwise((0, *cuts, blocks)))


@pytest.mark.parametrize("seed", range(40))
def test_no_other_split_has_a_faster_slowest_stage(seed: int) -> None:
    draw = random.Random(seed)
    blocks = draw.randint(2, 9)
    stages = draw.randint(1, blocks)
    seconds = [draw.choice([0, 1, 1, 1, draw.random(), 7]) for _ in range(blocks)]
    memory = [draw.randint(0, 4) for _ in range(blocks)]
    caps = [draw.randint(3, 16) for _ in range(stages)]

    def fits(stage: int, held: range) -> bool:
        return sum(memory[block] for block in held) <= caps[stage]

    def costs(split: tuple[range, ...]) -> list[float]:
        return [sum(seconds[block] for block in held) for held in split]

    allowed = [split for split in splits(blocks, stages) if all(fits(*pair) for pair in enumerate(split))]
    found = partition(seconds, stages, fits)
    if not allowed:
        assert found is None
        return
    assert found in allowed
    least = min(max(costs(split)) for split in allowed)
    assert max(costs(found)) == pytest.approx(least)
    even = min(sum(c**2 for c in costs(split)) for split in allowed if max(costs(split)) <= least + 1e-9)
    assert sum(cost**2 for cost in costs(found)) == pytest.approx(even)


def test_a_heavy_head_stands_alone() -> None:
    found = partition([1, 1, 1, 1, 1, 9], 2)
    assert found is not None and layers_of(found) == (range(4), range(4, 4))


@pytest.mark.parametrize("counts", [[2, 3], [0, 5], [5, 0], [0, 5, 0], [1, 1, 3]])
def test_blocks_and_layers_say_the_same(counts: list[int]) -> None:
    layers = split_layers(5, len(counts), counts)
    blocks = blocks_of(layers)
    assert layers_of(blocks) == layers
    assert [block for held in blocks for block in held] == list(range(7))


@pytest.mark.parametrize(("pp", "per_rank", "micro_batches"), [(2, 1, 8), (4, 1, 16), (4, 2, 8), (3, 3, 9)])
def test_equal_stages_have_the_known_bubble(pp: int, per_rank: int, micro_batches: int) -> None:
    stages = pp * per_rank
    blocks = tuple(range(stage, stage + 1) for stage in range(stages))
    found = predict([2.0] * stages, blocks, SCHEDULES["interleaved_1f1b"].place(pp, per_rank), micro_batches)
    assert found.bubble_share == pytest.approx((pp - 1) / (per_rank * micro_batches + pp - 1))
    assert found.imbalance == pytest.approx(1)


@pytest.mark.parametrize("seed", range(10))
def test_uneven_stages_take_as_long_as_a_simulated_pipeline(seed: int) -> None:
    """GPipe's forward half, tick by tick: a stage begins a micro-batch when it and the stage before are through."""
    draw = random.Random(seed)
    stages, micro_batches = draw.randint(2, 5), draw.randint(5, 12)
    seconds = [draw.uniform(1, 3) for _ in range(stages)]
    through = [0.0] * stages
    for _ in range(micro_batches):
        arrived = 0.0
        for stage in range(stages):
            arrived = through[stage] = max(arrived, through[stage]) + seconds[stage]
    found = predict(seconds, tuple(range(s, s + 1) for s in range(stages)), tuple(range(stages)), micro_batches)
    assert found.step_s == pytest.approx(through[-1])
    assert found.imbalance == pytest.approx(max(seconds) * stages / sum(seconds))
