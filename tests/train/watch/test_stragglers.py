"""What the numbers of all ranks come to; a rank that the others wait for is named once and with its node."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpc_train.layout.layout import Layout
from hpc_train.train.watch.stragglers import IN_A_ROW, RankTimes, SlowRankWatch, find_slow_rank, over_ranks

ROW = RankTimes(seconds=10.0, steps=5, data_s=1.0, memory_bytes=100)


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


def test_shares_imbalance_and_skew() -> None:
    measured = [
        replace(ROW, communication_s=4.0, bubble_s=1.0, memory_bytes=300, net_sent=50, net_received=0),
        replace(ROW, communication_s=3.0, bubble_s=1.0),
        replace(ROW, communication_s=0.0, bubble_s=3.0, net_sent=25, net_received=0),
        replace(ROW, communication_s=1.0, bubble_s=3.0),
    ]
    found = over_ranks(measured, layout(dp=2, pp=2))
    assert found == pytest.approx({
        "data_wait_share": 0.1,
        "comm_share": 0.2,
        "bubble_share": 0.2,
        "compute_imbalance": 6 / 5,  # 4, 5, 6, 5 seconds are left
        "arrival_skew_s": 0.2,  # in either stage 1 s in 5 steps, not the 4 s between stages
        "peak_memory_bytes": 300,
        "memory_imbalance": 2.0,
        "net_tx_bytes": 15.0,
        "net_rx_bytes": 0.0,
    })  # fmt: skip


def test_what_one_rank_does_not_know_is_absent() -> None:
    measured = [replace(ROW, communication_s=1.0, gpu_util=0.5), ROW]
    assert over_ranks(measured, layout(dp=2)).keys() == {
        "data_wait_share", "peak_memory_bytes", "memory_imbalance",
    }  # fmt: skip


def test_one_gpu_that_waits_for_the_host() -> None:
    found = over_ranks([replace(ROW, gpu_util=0.6)], layout(dp=1))
    assert found == pytest.approx(
        {"data_wait_share": 0.1, "peak_memory_bytes": 100, "gpu_util": 0.6, "host_share": 0.3}
    )
