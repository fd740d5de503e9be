"""What counts as a checkpoint, and what is kept of them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from hpc_train.checkpoint.disk import HashedFile
from hpc_train.checkpoint.manifest import COMMITTED, METADATA, NAME, BadCheckpoint, FileEntry, Manifest, decode, verify
from hpc_train.checkpoint.store import CheckpointStore, Kept, Retention, removable
from hpc_train.config.evaluation import BestMetric
from hpc_train.machine.storage import FileSystem
from tests.checkpoint.made import is_complete
from tests.checkpoint.tiny import commit as commit_tensors


def commit(store: CheckpointStore, step: int, attempt: int = 0, text: str = "text") -> Path:
    writing = store.begin(step, attempt)
    files = {}
    for name in ("__0_0.distcp", METADATA):
        file = HashedFile(writing / name)
        file.write(text.encode())
        file.close()
        files[name] = FileEntry(file.size, file.digest)
    return store.commit(writing, Manifest(step, files, attempt=attempt)).path


def test_committed_are_in_order_and_half_written_ones_are_not_among_them(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.newest() is None
    for step in (100, 20, 3):
        commit(store, step)
    store.begin(400, 0)
    (store.root / "step-00000500.tmp").mkdir()
    assert [checkpoint.step for checkpoint in store.committed()] == [3, 20, 100]
    newest = store.newest()
    assert newest is not None
    assert newest.manifest().step == 100
    verify(newest.path, newest.manifest())


@pytest.mark.parametrize("keep", [0, 1, 2, 9])
def test_prune_keeps_the_newest_and_never_none(tmp_path: Path, keep: int) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        commit(store, step)
    store.prune(Retention(keep), attempt=0)
    assert [checkpoint.step for checkpoint in store.committed()] == [1, 2, 3][-max(1, keep) :]


def test_the_newest_whole_one_is_never_removed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        commit(store, step)
    (tmp_path / "step-00000003" / METADATA).write_bytes(b"")
    store.prune(Retention(1), attempt=0)
    assert [checkpoint.step for checkpoint in store.committed()] == [2, 3]


def test_prune_removes_what_earlier_attempts_left_unfinished(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    commit(store, 1)
    for attempt in (0, 1, 2):
        store.begin(7, attempt)
    (tmp_path / ".step-00000000.removed").mkdir()
    store.prune(Retention(2), attempt=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".step-00000007.attempt-001.0",
        ".step-00000007.attempt-002.0",
        "step-00000001",
    ]


def test_a_directory_is_never_written_into_twice(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert store.begin(5, 0) != store.begin(5, 0)
    late = store.begin(5, 1)
    commit(store, 5)
    with pytest.raises(FileExistsError):
        store.begin(5, 1)
    with pytest.raises(FileExistsError):
        store.commit(late, Manifest(5, {METADATA: FileEntry(0, "")}))
    assert (tmp_path / "step-00000005" / METADATA).read_text() == "text"


def test_every_mth_and_the_best_stay() -> None:
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: float("nan"), 50: 1.5, 60: 1.6}
    found = [Kept(step, {"val_loss": loss, "val_accuracy": -loss}) for step, loss in losses.items()]
    assert removable(found, Retention(1)) == {10, 20, 30, 40, 50}
    assert removable(found, Retention(1, best=BestMetric("val_loss", highest=False))) == {10, 30, 40, 50}
    assert removable(found, Retention(1, best=BestMetric("val_accuracy", highest=True))) == {10, 30, 40, 50}
    assert removable(found, Retention(2, every=30)) == {10, 20, 40}
    equal = [Kept(step, {"val_loss": 1.0, "val_accuracy": 0.5}) for step in (10, 20, 30)]
    for metric in (BestMetric("val_loss", highest=False), BestMetric("val_accuracy", highest=True)):
        assert removable(equal, Retention(1, best=metric)) == {20}, "the first of equals is the best"
    assert removable(found, Retention(1, every=25)) == {10, 20, 40}


def test_a_guard_that_refuses_stops_every_change(tmp_path: Path) -> None:
    commit(CheckpointStore(tmp_path), 1)
    writing = CheckpointStore(tmp_path).begin(2, 0)
    before = sorted(tmp_path.iterdir())

    def refuse() -> None:
        raise PermissionError("a newer attempt")

    store = CheckpointStore(tmp_path, refuse)
    newest = store.newest()
    assert newest is not None
    for change in (
        lambda: store.begin(3, 0),
        lambda: store.commit(writing, Manifest(2, {METADATA: FileEntry(0, "")})),
        lambda: store.set_aside(newest, 0),
        lambda: store.prune(Retention(1), 1),
    ):
        with pytest.raises(PermissionError):
            change()
    assert sorted(tmp_path.iterdir()) == before


def test_a_manifest_with_any_bit_flipped_is_refused() -> None:
    data = Manifest(7, {METADATA: FileEntry(5, "ab"), "__0_0.distcp": FileEntry(6, "cd")}, {"tokens": 5}).encode()
    assert decode(data).extra == {"tokens": 5}
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadCheckpoint):
            decode(bytes(flipped))


def test_both_kinds_are_found_and_told_from_what_was_never_finished(tmp_path: Path) -> None:
    renames, marks = CheckpointStore(tmp_path), CheckpointStore(tmp_path, by_marker=True)
    for store, step in ((renames, 1), (marks, 2), (renames, 3), (marks, 4)):
        commit_tensors(store, step)
    marks.begin(5, attempt=0)
    for store in (renames, marks):
        assert [found.step for found in store.committed()] == [1, 2, 3, 4]
        assert all(is_complete(found) for found in store.committed())
        with pytest.raises(FileExistsError):
            commit_tensors(store, 2)
    (tmp_path / "step-00000002.attempt-000.0" / COMMITTED).write_bytes(b"cut sho")
    assert [found.step for found in renames.committed()] == [1, 3, 4]
    other = (tmp_path / "step-00000003" / NAME).read_bytes()
    (tmp_path / "step-00000004.attempt-000.0" / NAME).write_bytes(other)
    with pytest.raises(BadCheckpoint):
        renames.committed()[-1].manifest()
    bad = marks.set_aside(marks.committed()[-1], attempt=1)
    assert bad.name == "bad.step-00000004.attempt-001" and not (bad / COMMITTED).exists()
    renames.prune(Retention(1), attempt=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.step-00000004.attempt-001", "step-00000003"]


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_marker_that_cannot_be_read_now_is_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    store, opened = CheckpointStore(tmp_path, by_marker=True), os.open
    for step in (1, 2):
        commit_tensors(store, step)

    def fails(path: Any, *args: Any, **kwargs: Any) -> int:
        if Path(path).name == COMMITTED:
            raise OSError(code, os.strerror(code))
        return opened(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fails)
        store.revoke(attempt=1)
        store.prune(Retention(1), attempt=1)
        assert [found.step for found in store.committed()] == [1, 2]
    assert all(is_complete(found) for found in store.committed())


@pytest.mark.parametrize(
    ("kind", "copies"), [("fuse.s3fs", True), ("fuse.gcsfuse", True), ("nfs4", False), ("fuse.sshfs", False)]
)
def test_which_file_systems_copy(kind: str, copies: bool) -> None:
    assert FileSystem(Path("/mnt"), kind, "bucket").copies_to_rename is copies
