"""A rank that the others wait for is named: surely, once, and with its node."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpc_train.layout.layout import Layout
from hpc_train.train.watch.stragglers import IN_A_ROW, RankTimes, SlowRankWatch, find_slow_rank

ROW = RankTimes(seconds=10.0, steps=5, data_s=0.0, memory_bytes=1)


def layout(dp: int, pp: int = 1) -> Layout:
    return Layout(
        dp=dp, pp=pp, tp=1, shard=1, data_parallel="ddp", schedule="1f1b", stages_per_rank=1, micro_batches=4,
        micro_size=1,
    )  # fmt: skip


def rows(*waits: float | None) -> list[RankTimes]:
    return [replace(ROW, communication_s=wait) for wait in waits]


@pytest.mark.parametrize(
    ("waits", "expected"),
    [
        ((5.0, 4.0, 0.5, 4.5), (2, 0.4)),
        ((5.0, 0.5), (1, 0.45)),
        ((1.0, 0.9, 0.1, 1.0), None),  # too little to matter
        ((5.0, 5.0, 0.0, 0.5), None),  # two slow ones: a slow network, rather
        ((5.0, 4.0, None, 4.5), None),
        ((0.0, 0.0, 0.0, 0.0), None),
    ],
)
def test_one_rank_that_hardly_waits(waits: tuple[float | None, ...], expected: tuple[int, float] | None) -> None:
    found = find_slow_rank(rows(*waits), layout(dp=len(waits)))
    assert found == (None if expected is None else (expected[0], pytest.approx(expected[1])))


def test_stages_are_not_compared_with_each_other() -> None:
    two_stages = layout(dp=2, pp=2)
    assert find_slow_rank(rows(0.0, 0.0, 6.0, 6.0), two_stages) is None
    assert find_slow_rank(rows(6.0, 6.0, 3.0, 0.0), two_stages) == (3, pytest.approx(0.3))


def test_it_is_named_once_and_only_when_lines_agree() -> None:
    watch = SlowRankWatch(layout(dp=2), ["n1", "n2"])
    slow, even = rows(5.0, 0.0), rows(1.0, 1.0)
    assert watch.look(slow) is None  # the first line has the start in it
    reported = [watch.look(line) for line in [slow, even, *[slow] * IN_A_ROW, slow]]
    assert [late is not None for late in reported] == [False] * (1 + IN_A_ROW) + [True, False]
    assert reported[-2] is not None
    assert reported[-2].details() | {"message": ""} == {"rank": 1, "node": "n2", "share": 0.5, "message": ""}
