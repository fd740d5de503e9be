"""A save that does not reach its end leaves the checkpoint before it in force."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_train.checkpoint import manager
from hpc_train.checkpoint.manager import CheckpointManager
from hpc_train.run.stop import StopFlag
from hpc_train.run.worker_spec import WorkerSpec
from tests.train.runs import frozen, run_attempt


def die_in_the_second_save(spec: WorkerSpec, stop: StopFlag) -> None:
    """Rank 1 dies when the files of step 4 are written and nothing is committed."""

    def fatal(path: Path) -> None:
        if "00000004" in path.parent.name:
            os._exit(1)

    if spec.rank == 1:
        manager.sync = fatal  # type: ignore[assignment]


def fail_to_commit(spec: WorkerSpec, stop: StopFlag) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    CheckpointManager._commit = full  # type: ignore[method-assign]


def test_a_rank_that_dies_in_a_save(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=dp", "checkpoint.every=2", "train.steps=6")

    def die_before_commit() -> None:
        run_attempt(run, 2, die_in_the_second_save)

    with pytest.raises(AssertionError, match="died without a word"):
        die_before_commit()
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [
        ".step-00000004.attempt-000",
        "step-00000002",
    ]
    assert run_attempt(run, 2) == [0, 0]
    assert [event["step"] for event in run.read_events() if event["event"] == "resumed"] == [2]
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-00000004", "step-00000006"]


def test_a_full_disk_is_told_on_every_rank(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=dp", "checkpoint.every=2")
    with pytest.raises(AssertionError) as caught:
        run_attempt(run, 2, fail_to_commit)
    assert str(caught.value).count("No space left on device") >= 2
    assert [event["event"] for event in run.read_events()] == ["checkpoint_failed"]
    assert list(run.checkpoints.glob("step-*")) == []
