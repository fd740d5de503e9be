"""What is read before a load, and how long a file may take to appear."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpc_train.checkpoint import manifest, verified
from hpc_train.checkpoint.manifest import METADATA, BadCheckpoint, read_manifest, verify
from hpc_train.checkpoint.snapshot import HostCopies
from hpc_train.checkpoint.store import Checkpoint, CheckpointStore
from hpc_train.checkpoint.verified import VerifiedSearch, on_network
from tests.checkpoint.tensors import read_tensors
from tests.checkpoint.tiny import commit
from tests.checkpoint.training import make_manager
from tests.ranks import run_ranks
from tests.train.runs import frozen


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return commit(CheckpointStore(tmp_path), 1)


@pytest.mark.parametrize("seen", ["missing", "short"])
def test_a_file_that_appears_late_is_waited_for(checkpoint: Checkpoint, seen: str) -> None:
    found = checkpoint.manifest()
    for name in (manifest.NAME, "__0_0.distcp"):
        file = checkpoint.path / name
        data = file.read_bytes()
        if seen == "missing":
            file.unlink()
        else:
            file.write_bytes(data[:0])
        with pytest.raises(BadCheckpoint):
            read_manifest(checkpoint.path) and verify(checkpoint.path, found)
        threading.Timer(0.2, file.write_bytes, (data,)).start()
        read_manifest(checkpoint.path, settle_s=10)
        verify(checkpoint.path, found, settle_s=10)


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ESTALE])
def test_an_old_view_of_another_node_is_looked_past(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    found, opened, old_views = checkpoint.manifest(), os.open, 0

    def old_view(path: Any, *args: Any) -> int:
        nonlocal old_views
        if Path(path).parent == checkpoint.path and old_views > 0:
            old_views -= 1
            raise OSError(code, os.strerror(code))
        return opened(path, *args)

    monkeypatch.setattr(os, "open", old_view)
    for look in (lambda s: read_manifest(checkpoint.path, s), lambda s: verify(checkpoint.path, found, settle_s=s)):
        old_views = 2
        look(100)
        old_views = 1
        with pytest.raises(BadCheckpoint, match=os.strerror(code)):
            look(0)


def test_waiting_ends(checkpoint: Checkpoint) -> None:
    found = checkpoint.manifest()
    (checkpoint.path / METADATA).unlink()
    began = time.monotonic()
    with pytest.raises(BadCheckpoint, match="No such file"):
        verify(checkpoint.path, found, settle_s=0.3)
    assert 0.3 <= time.monotonic() - began < 5


def test_a_file_that_may_not_be_read_is_not_called_bad(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(PermissionError):
        read_manifest(checkpoint.path)


def test_local_file_systems_are_told_from_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = (
        "1 0 0:1 / / rw - ext4 a rw\n"
        f"2 1 0:2 / {tmp_path} rw shared:1 - nfs4 b rw\n"
        f"3 2 0:3 / {tmp_path}/in rw - xfs c rw\n"
    )
    monkeypatch.setattr(Path, "read_text", lambda self, **kwargs: mounts)
    assert [on_network(path) for path in (Path("/usr"), tmp_path / "a", tmp_path / "in/b")] == [False, True, False]


def hashed_bytes(rank: int, world_size: int, folder: str) -> list[int]:
    """Bytes that were read by searches: the first, a second one in the same job, one by sizes, one in another job."""
    store, group, read = CheckpointStore(Path(folder)), dist.group.WORLD, []
    assert group is not None
    original = manifest._hash

    def counted(file: Any, on_bytes: Any) -> str:
        read[-1] += os.fstat(file.fileno()).st_size
        return original(file, on_bytes)

    manifest._hash = counted
    for full in (True, True, False):
        read.append(0)
        assert VerifiedSearch(store, group, full, 0.0, lambda bad, why: None).newest() is not None
    verified.process = lambda pid: {"pid": "of another job"}  # type: ignore[assignment]
    read.append(0)
    assert VerifiedSearch(store, group, True, 0.0, lambda bad, why: None).newest() is not None
    return read


def test_a_restart_in_the_same_job_does_not_read_everything_again(checkpoint: Checkpoint) -> None:
    size = checkpoint.manifest().size
    one, two = run_ranks(2, hashed_bytes, str(checkpoint.path.parent))
    assert [a + b for a, b in zip(one, two, strict=True)] == [size, 0, 0, size]


def save_while_training(rank: int, world_size: int, path: str) -> list[bool]:
    """Saves in the background, changes all tensors at once, and looks at what was saved."""
    manager = make_manager(rank, world_size, path)
    under_way = []
    for step in (1, 2, 3):
        for parameter in manager.engine.named_parameters().values():
            parameter.detach().fill_(step)
        manager.save(step, {})
        under_way.append(manager._thread is not None)
        for parameter in manager.engine.named_parameters().values():
            parameter.detach().fill_(-1)
    manager.save(4, {}, final=True)
    return [*under_way, manager._thread is None]


def test_a_save_in_the_background_is_of_the_moment_of_its_request(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=zero2", "checkpoint.asynchronous=true", "checkpoint.keep=9")
    assert run_ranks(2, save_while_training, str(run.path)) == [[True] * 4] * 2
    for step, value in ((1, 1), (2, 2), (3, 3), (4, -1)):
        found = read_tensors(run.checkpoints / f"step-{step:08d}")
        assert all((tensor == value).all() for name, tensor in found.items() if name.startswith("model.")), step


def test_host_copies_are_reused() -> None:
    copies, state = HostCopies(), {"a": torch.ones(4), "b": torch.zeros(2, dtype=torch.int64)}
    first = copies.take(state)
    state["a"].fill_(5)
    assert first["a"].tolist() == [1] * 4
    second = copies.take(state)
    assert second["a"].tolist() == [5] * 4
    assert [second[name].data_ptr() for name in second] == [first[name].data_ptr() for name in second]
