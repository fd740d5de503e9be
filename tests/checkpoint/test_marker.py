"""Commits by a file, for file systems that rename a directory by copying it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from hpc_train.checkpoint import disk
from hpc_train.checkpoint.manifest import COMMITTED, NAME, BadCheckpoint
from hpc_train.checkpoint.store import CheckpointStore, Retention
from hpc_train.machine.storage import FileSystem
from tests.checkpoint.made import is_complete
from tests.checkpoint.test_crash_states import Recorder
from tests.checkpoint.tiny import LIMIT_S, commit
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(LIMIT_S + 50)


class MarkerRecorder(Recorder):
    """As the other, for a store that never renames a directory."""

    def record(self, patch: pytest.MonkeyPatch) -> None:
        super().record(patch)
        recorded_rename, unlink = os.rename, disk.unlink

        def rename_files_only(source: Any, target: Any) -> None:
            assert not (Path(source).is_dir() and Path(source).is_relative_to(self.root)), source
            recorded_rename(source, target)

        def recorded_unlink(path: Path) -> None:
            if path.is_relative_to(self.root):
                self.node(path.parent).change(**{path.name: None})
            unlink(path)

        patch.setattr(os, "rename", rename_files_only)
        patch.setattr(disk, "unlink", recorded_unlink)


def save_and_crash(rank: int, world_size: int, folder: str) -> int:
    root, states = Path(folder) / "root", Path(folder) / "states"
    root.mkdir()
    states.mkdir()
    recorder, store = MarkerRecorder(root, states), CheckpointStore(root, by_marker=True)
    with pytest.MonkeyPatch.context() as patch:
        recorder.record(patch)
        for step in (1, 2, 3):
            recorder.returned = commit(store, step).step
            store.prune(Retention(1), attempt=0)
    return recorder.prefixes


@pytest.mark.long_form(10)  # test_crash_states has those of a rename
def test_every_state_that_a_crash_can_leave_holds_the_last_commit(tmp_path: Path) -> None:
    (prefixes,) = run_ranks(1, save_and_crash, str(tmp_path), timeout=LIMIT_S)
    assert prefixes > 40
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["step-00000003.attempt-000.0"]


def test_both_kinds_are_found_and_told_from_what_was_never_finished(tmp_path: Path) -> None:
    renames, marks = CheckpointStore(tmp_path), CheckpointStore(tmp_path, by_marker=True)
    for store, step in ((renames, 1), (marks, 2), (renames, 3), (marks, 4)):
        commit(store, step)
    marks.begin(5, attempt=0)
    for store in (renames, marks):
        assert [found.step for found in store.committed()] == [1, 2, 3, 4]
        assert all(is_complete(found) for found in store.committed())
        with pytest.raises(FileExistsError):
            commit(store, 2)
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
        commit(store, step)

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
