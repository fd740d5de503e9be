"""A save that does not reach its end leaves the checkpoint before it in force."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_train.checkpoint import disk
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.requests import StopFlag
from tests.train.runs import frozen, run_attempt

FULL = OSError(28, "No space left on device")


def die_in_the_second_save(spec: WorkerSpec, stop: StopFlag) -> None:
    """Rank 1 dies when the files of step 4 are written and nothing is committed."""
    close = disk.HashedFile.close

    def fatal(file: disk.HashedFile) -> None:
        close(file)
        if "00000004" in file.path.parent.name:
            os._exit(1)

    if spec.rank == 1:
        disk.HashedFile.close = fatal  # type: ignore[assignment, method-assign]


def full_in_step_four(spec: WorkerSpec, stop: StopFlag) -> None:
    _full(spec, "00000004")


def full_in_step_ten(spec: WorkerSpec, stop: StopFlag) -> None:
    _full(spec, "00000010")


def _full(spec: WorkerSpec, step: str) -> None:
    write = disk.write

    def full(file: object, data: memoryview) -> None:
        if step in file.name:  # type: ignore[attr-defined]
            raise FULL
        write(file, data)  # type: ignore[arg-type]

    if spec.rank == 1:
        disk.write = full


def test_a_rank_that_dies_in_a_save(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=dp", "checkpoint.every=2", "train.steps=6")
    with pytest.raises(AssertionError, match="died without a word"):
        run_attempt(run, 2, die_in_the_second_save)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [
        ".step-00000004.attempt-000.0",
        "step-00000002",
    ]
    assert run_attempt(run, 2) == [0, 0]
    assert [event["step"] for event in run.read_events() if event["event"] == "resumed"] == [2]
    names = [".verified.json", "step-00000004", "step-00000006"]
    assert sorted(path.name for path in run.checkpoints.iterdir()) == names


@pytest.mark.long_form(8)
@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_training_goes_on_when_the_disk_is_full_and_saves_again(tmp_path: Path, asynchronous: str) -> None:
    more = ("checkpoint.every=2", f"checkpoint.asynchronous={asynchronous}")
    run = frozen(tmp_path / "run", "+strategy=dp", *more)
    assert run_attempt(run, 2, full_in_step_four) == [0, 0]
    reported = [
        (event["event"], event["step"]) for event in run.read_events() if event["event"].startswith("checkpoint")
    ]
    assert reported == [
        ("checkpoint_saved", 2),
        ("checkpoint_failed", 4),
        *(("checkpoint_saved", n) for n in (6, 8, 10)),
    ]
    failed = next(event for event in run.read_events() if event["event"] == "checkpoint_failed")
    assert failed["message"] == "rank 1: OSError: [Errno 28] No space left on device"
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-00000008", "step-00000010"]


def test_a_last_save_that_fails_is_told_on_every_rank(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=dp", "checkpoint.every=4", "checkpoint.wait_for_room_s=0")
    with pytest.raises(AssertionError) as caught:
        run_attempt(run, 2, full_in_step_ten)
    assert str(caught.value).count("SaveFailed: rank 1: OSError: [Errno 28] No space left on device") == 2
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-00000004", "step-00000008"]
