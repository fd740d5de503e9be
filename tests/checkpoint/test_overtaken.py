"""An attempt that is stopped within a save, all its ranks at once, and wakes up when a newer one has ended the run."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from hpc_train.checkpoint import disk
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.directory import RunDirectory
from hpc_train.run.processes import process_state
from hpc_train.run.requests import StopFlag
from tests.checkpoint.test_commands import everything
from tests.train.runs import frozen, run_attempt

LIMIT_S = 100


def sleep_in_the_second_save(spec: WorkerSpec, stop: StopFlag) -> None:
    """Each rank stops where its files of step 4 are written and nothing is committed."""
    close = disk.HashedFile.close

    def asleep(file: disk.HashedFile) -> None:
        first = file._file is not None
        close(file)
        if first and "step-00000004" in file.path.parent.name:
            (Path(spec.run_dir) / f"asleep-{spec.rank}").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)

    disk.HashedFile.close = asleep  # type: ignore[assignment, method-assign]


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
