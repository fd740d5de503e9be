"""A run that has saved checkpoints and finds none is refused; a run that never saved begins at step 0 as ever."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_train.checkpoint import store
from hpc_train.checkpoint.store import CheckpointStore, furthest_saved, wait_for_checkpoint
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.requests import StopFlag
from tests.train.runs import frozen, run_attempt

SHORT = ("+strategy=dp", "model.n_layers=1", "train.steps=4", "checkpoint.every=2")


def resumed_at(run: RunDirectory) -> list[int]:
    return [event["step"] for event in run.read_events() if event["event"] == "resumed"]


def fails_in_step_three(spec: WorkerSpec, stop: StopFlag) -> None:
    from hpc_train.train.step import TrainStep

    take = TrainStep.__call__

    def failing(self, step, batch):  # type: ignore[no-untyped-def]
        if step == 2:
            raise ArithmeticError("on purpose")
        return take(self, step, batch)

    TrainStep.__call__ = failing  # type: ignore[method-assign]


@pytest.mark.long_form(8, cases=["checkpoints/step-*"])
@pytest.mark.parametrize("gone", ["checkpoints", "checkpoints/step-*"])
def test_every_rank_refuses_and_says_what_was_there(tmp_path: Path, gone: str) -> None:
    run = frozen(tmp_path / "run", *SHORT, "checkpoint.every=3", "train.steps=5")
    assert run_attempt(run, 2) == [0, 0]
    frozen(run.path, *SHORT, "train.steps=8")
    for path in run.path.glob(gone):
        shutil.rmtree(path)
    with pytest.raises(AssertionError) as refused:
        run_attempt(run, 2)
    said = str(refused.value)
    assert "Purged: this run had saved a checkpoint of step 5, but none of its checkpoints is left" in said
    assert f"{run.checkpoints}, where its checkpoints are expected" in said
    assert f"rm -r {run.path}" in said and "another run.name" in said
    assert [line["step"] for line in run.read_metrics()] == [1, 2, 3, 4, 5], "nothing was trained"
    assert not (run.metrics_file(1)).exists()


@pytest.mark.long_form(6)
def test_how_far_it_had_trained_is_said(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", *SHORT)
    with pytest.raises(AssertionError, match="on purpose"):
        run_attempt(run, 2, fails_in_step_three)
    assert [line["step"] for line in run.read_metrics()] == [1, 2]
    with run.metrics_file(0).open("a") as file:
        file.write('{"step":3,"attempt":0,"loss":1.0,"time":1.0}\n')
    shutil.rmtree(run.checkpoints)
    with pytest.raises(AssertionError, match="a checkpoint of step 2 and had trained to step 3, but no"):
        run_attempt(run, 2)


@pytest.mark.long_form(8)
def test_a_run_that_never_saved_begins_at_step_0(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", *SHORT, "checkpoint.every=0")
    with pytest.raises(AssertionError, match="on purpose"):
        run_attempt(run, 2, fails_in_step_three)
    shutil.rmtree(run.checkpoints)
    assert run_attempt(run, 2) == [0, 0]
    assert [line["step"] for line in run.read_metrics()] == [1, 2, 3, 4]


def test_a_purge_that_took_the_first_events_too_is_noticed_by_a_later_attempt(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", *SHORT)
    EventLog.open(run, "rank-0000", 1, 0).write("resumed", step=4, path=str(run.checkpoints / "step-00000004"))
    assert furthest_saved(run) == 4
    EventLog.open(run, "rank-0000", 2, 0).write("resumed", step=9, path=str(tmp_path / "source/checkpoints/step-9"))
    assert furthest_saved(run) == 4, "the checkpoint of a fork's source is not its own"


@pytest.mark.long_form(6)
def test_a_purge_that_took_all_events_is_noticed_by_the_record(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", *SHORT)
    with pytest.raises(AssertionError, match="on purpose"):
        run_attempt(run, 2, fails_in_step_three)
    assert "result" not in run.record()
    shutil.rmtree(run.checkpoints)
    shutil.rmtree(run.events)
    with pytest.raises(AssertionError, match="had saved a checkpoint of step 2"):
        run_attempt(run, 2)


@pytest.mark.parametrize("problem", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_listing_that_fails_is_not_an_empty_one(
    tmp_path: Path, problem: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python 3.14 sees a stale handle: is_dir and exists are False for any error."""
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.committed() == store.bad() == []
    (store.root / "step-00000002").mkdir(parents=True)

    def fails(self: Path) -> Iterator[Path]:
        raise OSError(problem, os.strerror(problem))

    monkeypatch.setattr(Path, "is_dir", lambda self: False)
    monkeypatch.setattr(Path, "exists", lambda self: False)
    monkeypatch.setattr(Path, "iterdir", fails)
    for look in (store.committed, store.bad, store.newest, lambda: wait_for_checkpoint(store, 0)):
        with pytest.raises(OSError, match=os.strerror(problem)):
            look()


@pytest.mark.long_form(6)
def test_a_fork_starts_from_its_source_once_and_not_again_after_a_purge(tmp_path: Path) -> None:
    source = frozen(tmp_path / "source", *SHORT)
    assert run_attempt(source, 2) == [0, 0]
    run = frozen(tmp_path / "fork", *SHORT, "train.steps=6")
    run.update_record(forked_from=str(source.path))
    assert run_attempt(run, 2) == [0, 0]
    assert resumed_at(run) == [4]
    shutil.rmtree(run.checkpoints)
    with pytest.raises(AssertionError, match="a checkpoint of step 6, but none of its checkpoints is left"):
        run_attempt(run, 2)


@pytest.mark.long_form(10)
def test_a_run_that_was_removed_starts_over(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", *SHORT)
    assert run_attempt(run, 2) == [0, 0]
    shutil.rmtree(run.path)
    run = frozen(tmp_path / "run", *SHORT)
    assert run_attempt(run, 2) == [0, 0]
    assert [line["step"] for line in run.read_metrics()] == [1, 2, 3, 4]


def test_a_listing_that_is_old_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a node whose NFS client still shows the directory as it was before the checkpoint was committed."""
    monkeypatch.setattr(store, "POLL_S", 0.01)
    checkpoints = CheckpointStore(tmp_path / "checkpoints")
    assert not wait_for_checkpoint(checkpoints, 0.05)

    def arrive() -> None:
        time.sleep(0.1)
        (checkpoints.root / "step-00000002").mkdir(parents=True)

    thread = threading.Thread(target=arrive)
    thread.start()
    assert wait_for_checkpoint(checkpoints, 60.0)
    thread.join()
