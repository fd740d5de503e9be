"""What counts as a checkpoint, and what is kept of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.checkpoint.store import CheckpointStore


def commit(store: CheckpointStore, step: int, attempt: int = 0, text: str = "") -> None:
    writing = store.writing(step, attempt)
    writing.mkdir(parents=True)
    (writing / "data").write_text(text)
    store.commit(writing, step, {"step": step})


def test_committed_are_in_order_and_half_written_ones_are_not_among_them(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.newest() is None
    for step in (100, 20, 3):
        commit(store, step)
    store.writing(400, 0).mkdir()
    (store.root / "step-00000500.tmp").mkdir()
    assert [checkpoint.step for checkpoint in store.committed()] == [3, 20, 100]
    newest = store.newest()
    assert newest is not None
    assert newest.record() == {"step": 100}


@pytest.mark.parametrize("keep", [0, 1, 2, 9])
def test_prune_keeps_the_newest_and_never_none(tmp_path: Path, keep: int) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        commit(store, step)
    store.prune(keep, attempt=0)
    assert [checkpoint.step for checkpoint in store.committed()] == [1, 2, 3][-max(1, keep) :]


def test_prune_removes_what_earlier_attempts_left_unfinished(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    commit(store, 1)
    for attempt in (0, 1, 2):
        store.writing(7, attempt).mkdir()
    (tmp_path / ".step-00000000.removed").mkdir()
    store.prune(2, attempt=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".step-00000007.attempt-001",
        ".step-00000007.attempt-002",
        "step-00000001",
    ]


def test_the_same_step_again_replaces_the_old_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    commit(store, 5, attempt=0, text="old")
    commit(store, 5, attempt=1, text="new")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]
    assert (tmp_path / "step-00000005" / "data").read_text() == "new"
