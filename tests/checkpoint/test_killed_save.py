"""A save that does not reach its end, or ends after a newer attempt, leaves the checkpoint before it in force."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_train.checkpoint import disk
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.directory import RunDirectory
from hpc_train.run.processes import process_state
from hpc_train.run.requests import StopFlag
from tests.checkpoint.test_commands import everything
from tests.train.runs import frozen, run_attempt

FULL = OSError(28, "No space left on device")
LIMIT_S = 100


def after_each_file_of_step_four(act: Callable[[], None]) -> None:
    """Calls ``act`` in this process when it has written a file of step 4, and nothing is committed."""
    close = disk.HashedFile.close

    def closed(file: disk.HashedFile) -> None:
        first = file._file is not None
        close(file)
        if first and "00000004" in file.path.parent.name:
            act()

    disk.HashedFile.close = closed  # type: ignore[assignment, method-assign]


def die_in_the_second_save(spec: WorkerSpec, stop: StopFlag) -> None:
    if spec.rank == 1:
        after_each_file_of_step_four(lambda: os._exit(1))


def sleep_in_the_second_save(spec: WorkerSpec, stop: StopFlag) -> None:
    def sleep() -> None:
        (Path(spec.run_dir) / f"asleep-{spec.rank}").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)

    after_each_file_of_step_four(sleep)


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


@pytest.mark.long_form(10)  # test_kills ends ranks at many points of a save
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


@pytest.mark.long_form(5)  # test_errors has what each rank reports, and test_full_disk a whole training
def test_a_last_save_that_fails_is_told_on_every_rank(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=dp", "checkpoint.every=4", "checkpoint.wait_for_room_s=0")
    with pytest.raises(AssertionError) as caught:
        run_attempt(run, 2, full_in_step_ten)
    assert str(caught.value).count("SaveFailed: rank 1: OSError: [Errno 28] No space left on device") == 2
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-00000004", "step-00000008"]


def sleepers(run: RunDirectory, ranks: int) -> list[int]:
    """Returns the stopped processes as soon as all ranks are stopped."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        found = [int(path.read_text() or 0) for path in run.path.glob("asleep-*")]
        if len(found) == ranks and all(process_state(pid) == "T" for pid in found):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


@pytest.mark.long_form(10)  # test_fenced and test_errors have attempts that were overtaken
@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_an_attempt_that_slept_changes_nothing(tmp_path: Path, asynchronous: str) -> None:
    run = frozen(tmp_path / "run", "+strategy=dp", "checkpoint.every=2", f"checkpoint.asynchronous={asynchronous}")
    reported: list[str] = []

    def first_attempt() -> None:
        try:
            run_attempt(run, 2, sleep_in_the_second_save, timeout=3 * LIMIT_S)
        except AssertionError as error:
            reported.append(str(error))

    thread = threading.Thread(target=first_attempt)
    thread.start()
    asleep = sleepers(run, 2)
    assert run_attempt(run, 2) == [0, 0]
    before = everything(run.checkpoints)
    for pid in asleep:
        os.kill(pid, signal.SIGCONT)
    thread.join(3 * LIMIT_S)
    assert "attempt 1 has taken over the run from attempt 0" in reported[0]
    assert everything(run.checkpoints) == before
    assert [found.name for found in sorted(run.checkpoints.glob("step-*"))] == ["step-00000008", "step-00000010"]
