"""A run whose slow rank hands micro-batches to another computes the same numbers, and moves them back."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpc_train.parallel.replica_engine import ReplicaEngine
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.requests import StopFlag
from hpc_train.train.report import Report
from hpc_train.train.trainer import Trainer
from hpc_train.train.watch.replica_balance import Move
from tests.train.runs import frozen, run_attempt

SLOWER = 3  # times the duration of a forward pass, which the slow rank sleeps in each micro-batch


def slow_until_moved(spec: WorkerSpec, stop: StopFlag) -> None:
    """Makes rank 1 slow until it has handed micro-batches over, and stops the run after they have come back."""
    forward = ReplicaEngine._forward
    report = Report.moved
    moves: list[Move] = []

    def slow_forward(self: ReplicaEngine, *args: Any) -> Any:
        began = time.perf_counter()
        result = forward(self, *args)
        if spec.rank == 1 and not moves:
            time.sleep(SLOWER * (time.perf_counter() - began))
        return result

    def moved(self: Report, step: int, move: Move) -> None:
        report(self, step, move)
        if move.counts[1] > move.before[1] and moves:
            stop.request("the rank has recovered")
        if move.counts[1] < move.before[1]:
            moves.append(move)

    ReplicaEngine._forward = slow_forward  # type: ignore[method-assign]
    Report.moved = moved  # type: ignore[method-assign]


def stop_after(steps: int, spec: WorkerSpec, stop: StopFlag) -> None:
    train = Trainer._train

    def counted(self: Trainer, *args: Any) -> Any:
        if self.step == steps:
            stop.request("as many steps as the other run")
        return train(self, *args)

    Trainer._train = counted  # type: ignore[method-assign]


def test_micro_batches_leave_a_slow_rank_and_come_back(tmp_path: Path) -> None:
    """Dropout and the order of the samples are those of the run without moves; their bits depend on the sums."""
    overrides = ["+strategy=dp", "batch.micro_batches=4", "batch.balance=true", "precision=fp64", "model.n_layers=1"]
    overrides += ["train.steps=2000"]
    run = frozen(tmp_path / "slow", *overrides)
    assert run_attempt(run, 2, slow_until_moved, timeout=900) == [75, 75]
    moved = [event for event in run.read_events() if event["event"] == "micro_batches_moved"]
    assert all(sum(event["counts"]) == 8 for event in moved)
    slow = next(event for event in moved if event["counts"][1] < 4)
    assert slow["micro_batch_s"][1] > slow["micro_batch_s"][0]
    assert moved[-1]["counts"][1] > slow["counts"][1]
    lines = run.read_metrics()
    even = frozen(tmp_path / "even", *overrides)
    assert run_attempt(even, 2, partial(stop_after, len(lines)), timeout=900) == [75, 75]
    for key in ("loss", "grad_norm", "samples", "tokens"):
        expected = [line[key] for line in even.read_metrics()][: len(lines)]
        assert [line[key] for line in lines] == pytest.approx(expected, rel=1e-9)
