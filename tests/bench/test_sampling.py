"""Statistics of repeated measurements, and intervals of time."""

from __future__ import annotations

import random

import pytest

from hpc_train.bench.request import Spread, paired_ratio
from hpc_train.train.watch.profiler import uncovered


def test_spread_is_the_median_with_the_tails_cut() -> None:
    values = [float(value) for value in range(101)]
    random.Random(0).shuffle(values)
    assert Spread.of(values) == Spread(50.0, 5.0, 95.0)
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)


def test_a_ratio_of_pairs_ignores_what_slows_both() -> None:
    draw = random.Random(1)
    slowness = [draw.uniform(1.0, 5.0) for _ in range(40)]
    first = [0.9 / slow * draw.gauss(1, 0.01) for slow in slowness]
    second = [1.0 / slow for slow in slowness]
    ratio = paired_ratio(first, second)
    assert ratio.low < 0.9 < ratio.high
    assert ratio.high - ratio.low < 0.02
    assert paired_ratio(first, second) == ratio  # the resampling is seeded


def test_the_interval_holds_the_true_ratio_as_often_as_it_says() -> None:
    draw = random.Random(2)
    held = 0
    for trial in range(100):
        pairs = [draw.gauss(1.0, 0.05) for _ in range(20)]
        ratio = paired_ratio(pairs, [1.0] * 20, resamples=400, seed=trial)
        held += ratio.low <= 1.0 <= ratio.high
    assert held >= 88


@pytest.mark.parametrize(
    ("intervals", "covers", "length"),
    [
        ([(0, 4)], [], 4),
        ([(0, 4), (2, 6)], [], 6),
        ([(0, 4)], [(1, 2), (1.5, 3)], 2),
        ([(0, 4)], [(-1, 5)], 0),
        ([], [(0, 3)], 0),
        ([(0, 1), (5, 6)], [(0.5, 5.5)], 1),
    ],
)
def test_what_is_not_covered(
    intervals: list[tuple[float, float]], covers: list[tuple[float, float]], length: float
) -> None:
    assert uncovered(intervals, covers) == pytest.approx(length)
