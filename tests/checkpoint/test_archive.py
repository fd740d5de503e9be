"""``checkpoint.archive``: what is copied, how it goes on after an interruption, and who may not write there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from hpc_train.checkpoint.archive import Archive, ArchiveError, Orphaned
from hpc_train.checkpoint.listing import inspect_checkpoint, list_archived
from hpc_train.checkpoint.manifest import BadCheckpoint, Manifest
from hpc_train.checkpoint.store import CheckpointStore
from hpc_train.checkpoint.writer import write_tensors
from hpc_train.config.evaluation import BestMetric
from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import ARCHIVE
from hpc_train.run.files import read_lines
from tests.checkpoint.tensors import assert_same_bits
from tests.train.runs import frozen, run_attempt

PARENT = os.getppid()


def commit(run: RunDirectory, step: int, metrics: Mapping[str, float]) -> None:
    store = CheckpointStore(run.checkpoints)
    writing = store.begin(step, 0)
    state = {"model.a": torch.full((100, 10), float(step)), "model.b": torch.ones(3)}
    files = write_tensors(state, writing, None, lambda size, count: None, one_file=False)
    store.commit(writing, Manifest(step, files, metrics=metrics))


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    """Of a run with four checkpoints; the second is the best."""
    run = RunDirectory(tmp_path / "root/mine")
    run.create()
    run.config.write_text("of the run")
    run.update_record(run_id="abc")
    for step, loss in ((1, 4.0), (2, 2.0), (3, 3.0), (4, 2.5)):
        commit(run, step, {"val_loss": loss})
    return Archive(run, RunDirectory(tmp_path / "elsewhere/mine"), BestMetric("val_loss", highest=False))


def steps(archive: Archive) -> list[int]:
    return [found.step for found in archive.store.committed()]


def test_the_best_and_the_last(archive: Archive) -> None:
    assert [found.step for found in archive.update(0, PARENT)] == [4, 2]
    assert steps(archive) == [2, 4]
    assert archive.update(0, PARENT) == []
    commit(archive.run, 5, {"val_loss": 1.0})
    archive.update(0, PARENT)
    assert steps(archive) == [5]
    shutil.rmtree(archive.run.checkpoints)
    commit(archive.run, 6, {})
    archive.update(0, PARENT)
    assert steps(archive) == [5, 6], "the best is kept though the run has lost it"
    for found in archive.store.committed():
        assert inspect_checkpoint(found, full=True).problem is None
    assert_same_bits(archive.store.committed()[-1].path, archive.run.checkpoints / "step-00000006")


def test_an_interrupted_copy_is_gone_on_with(archive: Archive) -> None:
    with pytest.raises(Orphaned):
        archive.update(0, parent=-1)
    assert steps(archive) == []
    (unfinished,) = archive.copy.checkpoints.iterdir()
    source = archive.run.checkpoints / "step-00000004"
    first, second, *_ = sorted(path.name for path in source.glob("__*"))
    shutil.copyfile(source / first, unfinished / first)
    (unfinished / second).write_bytes((source / second).read_bytes()[:-1] + b"?")
    kept = {name: (unfinished / name).stat().st_ino for name in (first, second)}
    archive.update(1, PARENT)
    copy = archive.copy.checkpoints / "step-00000004"
    assert inspect_checkpoint(archive.store.committed()[-1], full=True).problem is None
    assert (copy / first).stat().st_ino == kept[first]
    assert (copy / second).stat().st_ino != kept[second]
    assert sorted(path.name for path in archive.copy.checkpoints.iterdir()) == ["step-00000002", "step-00000004"]


def test_a_run_that_has_gone_back(archive: Archive) -> None:
    """After step 3, say: the copy of step 4 is of the way that it left, and a step 4 of the new way replaces it."""
    archive.update(0, PARENT)
    shutil.rmtree(archive.run.checkpoints / "step-00000004")
    archive.update(0, PARENT)
    assert steps(archive) == [2, 3]
    commit(archive.run, 4, {"val_loss": 2.2})
    archive.update(0, PARENT)
    shutil.rmtree(archive.run.checkpoints / "step-00000004")
    commit(archive.run, 4, {"val_loss": 1.2})
    archive.update(0, PARENT)
    assert [found.manifest().metrics["val_loss"] for found in archive.store.committed()] == [1.2]


def test_what_is_damaged_or_anothers_is_not_taken(archive: Archive) -> None:
    archive.update(0, PARENT)
    commit(archive.run, 7, {})
    file = next((archive.run.checkpoints / "step-00000007").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(BadCheckpoint, match="the content does not match its checksum"):
        archive.update(0, PARENT)
    assert steps(archive) == [2, 4]
    archive.run.update_record(run_id="other")
    with pytest.raises(ArchiveError, match=r"another run \(abc\)"):
        archive.update(0, PARENT)
    archive.adopt()
    with pytest.raises(BadCheckpoint):
        archive.update(0, PARENT)


def test_a_run_that_has_lost_its_checkpoints_goes_on_from_the_archive(tmp_path: Path) -> None:
    settings = [f"run.root={tmp_path}/root", f"checkpoint.archive={tmp_path}/elsewhere", "checkpoint.every=2"]
    run = frozen(tmp_path / "root/mine", "+strategy=dp", "train.steps=4", *settings)
    assert set(run_attempt(run, 2)) == {0}
    assert [found.checkpoint.step for found in list_archived(run)] == [4]
    reported = [event["step"] for event in run.read_events() if event["event"] == "checkpoint_archived"]
    assert reported[-1] == 4
    shutil.rmtree(run.path)  # a purge
    run = frozen(tmp_path / "root/mine", "+strategy=dp", "train.steps=6", *settings)
    assert set(run_attempt(run, 2)) == {0}
    (resumed,) = (event for event in run.read_events() if event["event"] == "resumed")
    assert (resumed["step"], Path(resumed["path"])) == (4, tmp_path / "elsewhere/mine/checkpoints/step-00000004")
    assert [line["step"] for line in run.read_metrics()] == [5, 6]
    assert [found.checkpoint.step for found in list_archived(run)] == [6]


def test_an_archive_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = frozen(tmp_path / "run", "+strategy=single", "train.steps=2", f"checkpoint.archive={tmp_path}/file")
    assert set(run_attempt(run, 1)) == {0}
    failed = [line for line in read_lines(run.events_file(ARCHIVE, 0)) if line["event"] == "archive_failed"]
    assert failed and "file" in failed[0]["message"]
