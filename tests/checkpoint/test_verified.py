"""What is read before a load, and how long a file may take to appear."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from hpc_train.checkpoint import manifest, verified
from hpc_train.checkpoint.manifest import METADATA, BadCheckpoint, read_manifest, verify
from hpc_train.checkpoint.reader import SafeReader
from hpc_train.checkpoint.store import Checkpoint, CheckpointStore
from hpc_train.checkpoint.verified import VerifiedSearch, on_network
from hpc_train.checkpoint.writer import quiet
from hpc_train.errors import UserError
from tests.checkpoint.made import is_complete
from tests.checkpoint.progress import LONG, Progress
from tests.checkpoint.tensors import read_tensors
from tests.checkpoint.tiny import LIMIT_S, commit, newest_good, state_of
from tests.checkpoint.training import make_manager
from tests.ranks import run_on_world, run_ranks
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
        read_manifest(checkpoint.path, visibility_timeout_s=10)
        verify(checkpoint.path, found, visibility_timeout_s=10)


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
    for look in (
        lambda s: read_manifest(checkpoint.path, s),
        lambda s: verify(checkpoint.path, found, visibility_timeout_s=s),
    ):
        old_views = 2
        look(100)
        old_views = 1
        with pytest.raises(BadCheckpoint, match=os.strerror(code)):
            look(0)


@pytest.mark.parametrize("name", [METADATA, "__0_0.distcp"])
def test_a_rank_waits_for_what_another_one_has_verified(checkpoint: Checkpoint, name: str) -> None:
    found, file = checkpoint.manifest(), checkpoint.path / name
    data = file.read_bytes()
    file.unlink()
    threading.Timer(0.2, file.write_bytes, (data,)).start()
    loaded = {key: torch.full_like(tensor, -1) for key, tensor in state_of(0).items()}
    with quiet():
        dcp.load(loaded, storage_reader=SafeReader(checkpoint.path, found, visibility_timeout_s=100), no_dist=True)
    assert all(torch.equal(loaded[key], tensor) for key, tensor in state_of(1).items())


def search_in_vain(rank: int, world_size: int, folder: str, code: int) -> tuple[str, list[str]]:
    """What a search raises where the second open of a file of a checkpoint fails, and which it called bad."""
    opened, group, bad, opens = os.open, dist.group.WORLD, list[str](), count()
    assert group is not None

    def fails(path: Any, *args: Any) -> int:
        if "step-" in str(path) and next(opens) >= 1:
            raise OSError(code, os.strerror(code))
        return opened(path, *args)

    search = VerifiedSearch(CheckpointStore(Path(folder)), group, True, 0.0, lambda found, why: bad.append(why))
    with mock.patch.object(os, "open", fails), pytest.raises((UserError, OSError)) as raised:
        search.newest()
    return f"{raised.typename}: {raised.value}", bad


@pytest.mark.parametrize(("code", "kind"), [(errno.EACCES, "UserError"), (errno.ENOTCONN, "OSError")])
def test_a_checkpoint_that_cannot_be_read_now_is_not_called_bad(checkpoint: Checkpoint, code: int, kind: str) -> None:
    ((reported, bad),) = run_on_world(1, search_in_vain, str(checkpoint.path.parent), code)
    assert reported.startswith(kind) and "rank 0 cannot read a checkpoint" in reported
    assert bad == [] and is_complete(checkpoint)


def test_waiting_ends(checkpoint: Checkpoint) -> None:
    found = checkpoint.manifest()
    (checkpoint.path / METADATA).unlink()
    began = time.monotonic()
    with pytest.raises(BadCheckpoint, match="No such file"):
        verify(checkpoint.path, found, visibility_timeout_s=0.3)
    assert time.monotonic() - began >= 0.3


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

    def search(full: bool) -> None:
        read.append(0)
        assert VerifiedSearch(store, group, full, 0.0, lambda bad, why: None).newest() is not None

    with mock.patch.object(manifest, "_hash", counted):
        for full in (True, True, False):
            search(full)
        with mock.patch.object(verified, "process", lambda pid: {"pid": "of another job"}):
            search(full=True)
    return read


def test_a_restart_in_the_same_job_does_not_read_everything_again(checkpoint: Checkpoint) -> None:
    size = checkpoint.manifest().size
    one, two = run_on_world(2, hashed_bytes, str(checkpoint.path.parent))
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


@pytest.mark.long_form(10)  # test_snapshot has the copies
def test_a_save_in_the_background_is_of_the_moment_of_its_request(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=zero2", "checkpoint.asynchronous=true", "checkpoint.keep=9")
    assert run_ranks(2, save_while_training, str(run.path)) == [[True] * 4] * 2
    for step, value in ((1, 1), (2, 2), (3, 3), (4, -1)):
        found = read_tensors(run.checkpoints / f"step-{step:08d}")
        assert all((tensor == value).all() for name, tensor in found.items() if name.startswith("model.")), step


pytestmark = pytest.mark.timeout(LIMIT_S + 50)

CASES = 5000 if LONG else 33


def flip(victim: Path, other: Path, choose: random.Random) -> None:
    data = bytearray(victim.read_bytes())
    data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
    victim.write_bytes(data)


def truncate(victim: Path, other: Path, choose: random.Random) -> None:
    victim.write_bytes(victim.read_bytes()[: choose.randrange(victim.stat().st_size)])


def fill_with_zeros(victim: Path, other: Path, choose: random.Random) -> None:
    data = bytearray(victim.read_bytes())
    at = choose.choice([index for index, byte in enumerate(data) if byte])
    length = min(len(data) - at, choose.randrange(1, 512))
    data[at : at + length] = bytes(length)
    victim.write_bytes(data)


def delete(victim: Path, other: Path, choose: random.Random) -> None:
    victim.unlink()


def append(victim: Path, other: Path, choose: random.Random) -> None:
    with victim.open("ab") as file:
        file.write(bytes(choose.randrange(1, 9)))


def swap_with_the_one_before(victim: Path, other: Path, choose: random.Random) -> None:
    same = victim.read_bytes() == (other / victim.name).read_bytes()  # as the metadata of the same tensors
    name = "__0_0.distcp" if same else victim.name
    shutil.copyfile(other / name, victim.parent / name)


def swap_inside(victim: Path, other: Path, choose: random.Random) -> None:
    second = choose.choice([path for path in victim.parent.iterdir() if path != victim])
    one, two = victim.read_bytes(), second.read_bytes()
    victim.write_bytes(two)
    second.write_bytes(one)


def swap_the_directory(victim: Path, other: Path, choose: random.Random) -> None:
    shutil.rmtree(victim.parent)
    shutil.copytree(other, victim.parent)


def leave_a_foreign_file(victim: Path, other: Path, choose: random.Random) -> None:
    (victim.parent / f"__{choose.randrange(9)}_7.distcp").write_bytes(b"x")


DAMAGES: tuple[Callable[[Path, Path, random.Random], None], ...] = (
    flip, flip, flip, truncate, fill_with_zeros, delete, append,
    swap_with_the_one_before, swap_inside, swap_the_directory, leave_a_foreign_file,
)  # fmt: skip


def damage_many(rank: int, world_size: int, folder: str, progress: Progress) -> list[str]:
    template = Path(folder) / "template"
    for step in (1, 2):
        commit(CheckpointStore(template), step)
    wrong = []
    os.fsync = lambda descriptor: None  # of thousands of directories that nobody needs after a crash
    for seed in map(int, progress.open(range(CASES))):
        root = Path(folder) / "case"
        shutil.copytree(template, root)
        choose = random.Random(seed)
        damage = DAMAGES[seed % len(DAMAGES)]
        victim = choose.choice(sorted((root / "step-00000002").iterdir()))
        damage(victim, root / "step-00000001", choose)
        found = newest_good(CheckpointStore(root))
        names = sorted(path.name for path in root.iterdir() if path.name != ".verified.json")
        harmless = damage is leave_a_foreign_file
        if harmless and found == 2 and names == ["step-00000001", "step-00000002"]:
            progress.passed(seed)
        elif found != 1 or names != ["bad.step-00000002.attempt-009", "step-00000001"]:
            wrong.append(f"seed {seed}, {damage.__name__} of {victim.name}: {found}, {names}")
        else:
            progress.passed(seed)
        shutil.rmtree(root)
    return wrong


def test_no_damaged_checkpoint_is_loaded(tmp_path: Path) -> None:
    assert run_ranks(1, damage_many, str(tmp_path), Progress.of("damage"), timeout=LIMIT_S) == [[]]
