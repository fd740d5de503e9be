"""Which micro-batches move between replicas, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from hpc_train.layout.layout import Layout
from hpc_train.train.watch.replica_balance import LEAST_LINES, LEAST_STEPS, ReplicaBalance, best_counts
from hpc_train.train.watch.stragglers import RankTimes

EVEN = Layout(
    dp=2, pp=1, tp=1, shard=1, data_parallel="allreduce", schedule="1f1b", stages_per_rank=1, micro_batches=4,
    micro_size=1,
)  # fmt: skip
PIPELINE = replace(EVEN, pp=2, micro_batches=8)


@pytest.mark.parametrize(
    ("layout", "seconds", "counts"),
    [
        (EVEN, (1.0, 1.0), (4, 4)),
        (EVEN, (1.0, 1.1), (4, 4)),
        (EVEN, (1.0, 2.0), (5, 3)),
        (EVEN, (3.0, 1.0), (2, 6)),
        (EVEN, (1.0, 100.0), (7, 1)),  # a replica keeps one
        (replace(EVEN, dp=4), (1.0, 1.0, 2.0, 1.0), (5, 5, 2, 4)),
        (replace(EVEN, dp=4, shard=2, data_parallel="zero3"), (1.0, 2.0), (5, 3)),
        (PIPELINE, (1.0, 2.0), (11, 5)),  # each has one idle micro-batch
        (PIPELINE, (1.0, 100.0), (14, 2)),  # a stage needs one
        (replace(PIPELINE, schedule="interleaved_1f1b", stages_per_rank=2), (1.0, 2.0), (12, 4)),  # even numbers
    ],
)
def test_counts_by_time(layout: Layout, seconds: tuple[float, ...], counts: tuple[int, ...]) -> None:
    assert best_counts(seconds, layout) == counts


@pytest.mark.parametrize(
    "layout", [EVEN, replace(EVEN, dp=4, shard=2, data_parallel="zero3"), replace(EVEN, dp=4, cp=2)]
)
def test_each_micro_batch_has_one_owner(layout: Layout) -> None:
    replicas = layout.dp // layout.lockstep_ranks
    counts = (7, *(4,) * (replicas - 2), 1)
    held = [layout.micro_batches_of(rank, counts) for rank in range(layout.dp)]
    assert [len(of_rank) for of_rank in held] == [counts[rank // layout.lockstep_ranks] for rank in range(layout.dp)]
    every = [(rank, number) for rank in range(layout.dp) for number in range(layout.micro_batches)]
    assert sorted(micro for of_rank in held for micro in of_rank) == every
    assert [layout.micro_batches_of(rank, (4,) * replicas) for rank in range(layout.dp)] == [
        layout.micro_batches_of(rank) for rank in range(layout.dp)
    ]


def lines(balance: ReplicaBalance, step: int, *work: float, steps: int = 10, of_steps: int = 30) -> int:
    """Shows lines of ``of_steps`` steps with ``work`` seconds per micro-batch, and returns the last step."""
    for last in range(step + steps, step + of_steps + 1, steps):
        seconds = balance.look(last, rows(balance.counts, work, steps))
    assert seconds == pytest.approx(work)
    return last


def rows(counts: Sequence[int], work: Sequence[float], steps: int) -> list[RankTimes]:
    busy = [count * seconds for count, seconds in zip(counts, work, strict=True)]
    return [
        RankTimes(
            max(busy) * steps, steps, 0.0, 1, communication_s=(max(busy) - rank_s) * steps, steps_s=max(busy) * steps
        )
        for rank_s in busy
    ]


def test_micro_batches_move_and_move_back() -> None:
    balance = ReplicaBalance(EVEN, moves=True)
    start = rows(balance.counts, (9.0, 1.0), 1)
    assert balance.look(1, start) is None  # includes the start-up
    step = lines(balance, 1, 0.1, 0.2)
    move = balance.decide((0.1, 0.2))
    assert move is not None and (move.counts, move.before, balance.counts) == ((5, 3), (4, 4), (5, 3))
    assert move.gain == pytest.approx(0.25)
    assert move.details()["message"].startswith("the replicas compute 5|3 micro-batches of a step instead of 4|4")
    balance.begin(step + 2)
    assert balance.look(step + 10, rows((4, 4), (0.1, 0.2), 10)) is None  # some of these steps were before the change
    step = lines(balance, step + 10, 0.1, 0.2)
    assert balance.decide((0.1, 0.2)) is None
    lines(balance, step, 0.1, 0.1, of_steps=60)
    move = balance.decide((0.1, 0.1))
    assert move is not None and move.counts == (4, 4)


def test_a_decision_needs_several_lines_and_steps() -> None:
    for steps in (1, 100):
        balance = ReplicaBalance(EVEN, moves=True)
        balance.look(0, rows(balance.counts, (1.0, 1.0), steps))
        decided = [balance.look(steps * line, rows(balance.counts, (1.0, 1.0), steps)) for line in range(1, 30)]
        assert decided.index((1.0, 1.0)) == max(LEAST_STEPS // steps, LEAST_LINES) - 1
    unknown = [replace(row, communication_s=None) for row in rows((4, 4), (1.0, 1.0), 100)]
    assert balance.look(3000, unknown) is None


def test_the_cost_of_uneven_replicas() -> None:
    balance = ReplicaBalance(EVEN, moves=False)
    assert balance.cost((1.0, 1.0)) == pytest.approx(0.0)
    assert balance.cost((1.0, 2.0)) == pytest.approx(1 / 3)  # 8 micro-batches in 5.3 s instead of 8 s
