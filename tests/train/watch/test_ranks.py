"""What the numbers of all ranks come to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpc_train.layout.layout import Layout
from hpc_train.train.watch.stragglers import RankTimes, over_ranks

LAYOUT = Layout(
    dp=2, pp=2, tp=1, shard=1, data_parallel="ddp", schedule="1f1b", stages_per_rank=1, micro_batches=4, micro_size=1
)
ROW = RankTimes(seconds=10.0, steps=5, data_s=1.0, memory_bytes=100)


def test_shares_imbalance_and_skew() -> None:
    rows = [
        replace(ROW, communication_s=4.0, bubble_s=1.0, memory_bytes=300, net_sent=50, net_received=0),
        replace(ROW, communication_s=3.0, bubble_s=1.0),
        replace(ROW, communication_s=0.0, bubble_s=3.0, net_sent=25, net_received=0),
        replace(ROW, communication_s=1.0, bubble_s=3.0),
    ]
    found = over_ranks(rows, LAYOUT)
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
    rows = [replace(ROW, communication_s=1.0, gpu_util=0.5), ROW]
    assert over_ranks(rows, replace(LAYOUT, pp=1)).keys() == {
        "data_wait_share", "peak_memory_bytes", "memory_imbalance",
    }  # fmt: skip


def test_one_gpu_that_waits_for_the_host() -> None:
    found = over_ranks([replace(ROW, gpu_util=0.6)], replace(LAYOUT, pp=1, dp=1))
    assert found == pytest.approx(
        {"data_wait_share": 0.1, "peak_memory_bytes": 100, "gpu_util": 0.6, "host_share": 0.3}
    )
