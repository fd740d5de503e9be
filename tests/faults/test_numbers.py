"""Faults of the numbers, and what a change of the world size may do to them: nothing."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from hpc_train.run.stop import StopFlag
from hpc_train.run.worker_spec import WorkerSpec
from tests.checkpoint.tensors import assert_same_bits
from tests.train.runs import frozen, run_attempt

REPRODUCIBLE = ["+strategy=dp", "train.reproducible=any_world_size", "train.steps=12", "checkpoint.every=2"]


def in_step(step: int, kill: bool, spec: WorkerSpec, stop: StopFlag) -> None:
    """The last rank is killed in ``step``, or asked to stop."""
    from hpc_train.train.step import TrainStep

    take = TrainStep.__call__

    def struck(self, index, batch):  # type: ignore[no-untyped-def]
        if index == step and spec.rank == spec.layout.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL) if kill else stop.request("test")
        return take(self, index, batch)

    TrainStep.__call__ = struck  # type: ignore[method-assign]


def test_kills_stops_and_4_2_1_3_4_ranks_leave_no_bit_changed(tmp_path: Path) -> None:
    whole = frozen(tmp_path / "whole", *REPRODUCIBLE)
    assert run_attempt(whole, 2) == [0, 0]
    run = frozen(tmp_path / "run", *REPRODUCIBLE)
    for ranks, step, kill in ((4, 3, True), (2, 4, False), (1, 7, True), (3, 8, False)):
        strike = partial(in_step, step, kill)
        if kill:
            with pytest.raises(AssertionError, match="died without a word"):
                run_attempt(run, ranks, strike)
        else:
            assert run_attempt(run, ranks, strike) == [75] * ranks
    assert run_attempt(run, 4) == [0] * 4
    assert [event["step"] for event in run.read_events() if event["event"] == "resumed"] == [2, 6, 6, 10]
    assert run.record()["result"]["weights_sha256"] == whole.record()["result"]["weights_sha256"]
    assert_same_bits(run.checkpoints / "step-00000012", whole.checkpoints / "step-00000012")
    losses = [(line["step"], line["loss"], line["grad_norm"]) for line in run.read_metrics()]
    assert losses == [(line["step"], line["loss"], line["grad_norm"]) for line in whole.read_metrics()]
