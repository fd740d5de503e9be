"""Errors of the file system at every call of a save, on each rank, and an attempt that was overtaken."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_train.checkpoint import disk, manager, space
from hpc_train.checkpoint.manager import CheckpointManager, Superseded
from hpc_train.checkpoint.store import CheckpointStore
from hpc_train.checkpoint.writer import SaveFailed
from hpc_train.config.errors import ConfigError
from hpc_train.run.directory import RunDirectory
from tests.checkpoint.test_layouts import make_manager
from tests.checkpoint.progress import LONG
from tests.checkpoint.tiny import LIMIT_S, commit
from tests.ranks import run_ranks
from tests.train.runs import frozen

pytestmark = pytest.mark.timeout(LIMIT_S + 50)

CODES = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EACCES, errno.ESTALE, errno.EROFS)
CALLS = ("make_directory", "create", "write", "sync", "sync_directory", "rename")
EXTRA = {"tokens": 0, "loss_scale": None}


class Fault:
    """Lets the ``at``-th of all calls of ``disk`` fail; counts them."""

    def __init__(self, at: int | None, code: int) -> None:
        self.at, self.code, self.count = at, code, 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in CALLS:
            patch.setattr(disk, name, self.wrapped(getattr(disk, name)))

    def wrapped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.count += 1
            if self.count - 1 == self.at:
                raise OSError(self.code, os.strerror(self.code))
            return original(*args)

        return call


def try_to_save(checkpoints: CheckpointManager, step: int, fault: Fault) -> str | None:
    with pytest.MonkeyPatch.context() as patch:
        fault.install(patch)
        try:
            checkpoints.save(step, EXTRA, final=True)
        except SaveFailed as error:
            return str(error)
    return None


def fail_everywhere(rank: int, world_size: int, path: str) -> list[str]:
    """What was wrong, for each call that was made to fail on rank 0 and then on rank 1."""
    os.fsync = lambda descriptor: None
    checkpoints = make_manager(rank, world_size, path)
    wrong: list[str] = []
    for victim in range(world_size):
        first = 1 + 1000 * victim
        counted = Fault(None, 0)
        assert try_to_save(checkpoints, first, counted) is None
        calls = checkpoints._of_all_ranks({str(rank): counted.count})[str(victim)]  # type: ignore[dict-item,call-overload]
        sites = range(calls) if LONG else sorted({*range(6), *range(6, calls, 29), *range(calls - 10, calls)})
        for number, site in enumerate(sites):
            code, step = CODES[number % len(CODES)], first + 1 + 2 * number
            before = [found.path.name for found in checkpoints.store.committed()]
            told = try_to_save(checkpoints, step, Fault(site if rank == victim else None, code))
            after = [found.path.name for found in checkpoints.store.committed()]
            if told is None:  # it was in the removal of old ones: committed
                fine = f"step-{step:08d}" in after
            else:
                fine = os.strerror(code) in told and set(before) <= set(after) and f"step-{step:08d}" not in after
            if not fine:
                wrong.append(f"call {site} of {calls} on rank {victim}, {os.strerror(code)}: {told}, {before} {after}")
            if try_to_save(checkpoints, step + 1, Fault(None, 0)) is not None:
                wrong.append(f"no save after call {site} failed on rank {victim}")
    return wrong


def test_an_error_at_any_call_is_told_on_every_rank_and_the_next_save_succeeds(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=zero2", "model.n_layers=1")
    assert run_ranks(2, fail_everywhere, str(run.path), timeout=LIMIT_S) == [[], []]
    events = run.read_events()
    failed = [event for event in events if event["event"] == "checkpoint_failed"]
    assert len(failed) > 20
    assert {int(event["message"].split("[Errno ")[1].split("]")[0]) for event in failed} == set(CODES)


def wake_up_late(rank: int, world_size: int, path: str) -> list[str]:
    checkpoints = make_manager(rank, world_size, path)
    checkpoints.save(1, EXTRA)
    run = RunDirectory(Path(path))
    if rank == 0:
        run.claim_attempt()
        run.claim_attempt()  # number 1: newer than this attempt
        for file in (run.checkpoints / "step-00000001").glob("__*"):
            file.write_bytes(b"damaged")
    told = []
    for act in (lambda: checkpoints.save(2, EXTRA), checkpoints.restore):
        with pytest.raises(Superseded) as caught:
            checkpoints._of_all_ranks({})  # one after the other
            act()
        told.append(str(caught.value))
    return told


def test_an_overtaken_attempt_changes_nothing(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=dp", "model.n_layers=1")
    words = "attempt 1 works on the run; attempt 0 may not change it"
    assert run_ranks(2, wake_up_late, str(run.path)) == [[words] * 2] * 2
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000001"]


def damage_and_restore(rank: int, world_size: int, path: str) -> list[Any]:
    checkpoints = make_manager(rank, world_size, path)
    for step in (1, 2):
        checkpoints.save(step, EXTRA)
    damage(checkpoints, 2, rank)
    restored = make_manager(rank, world_size, path).restore()
    assert restored is not None
    damage(checkpoints, 1, rank)
    refusals = []
    for _ in range(2):
        again = make_manager(rank, world_size, path)
        with pytest.raises(ConfigError) as caught:
            again.restore()
        refusals.append(caught.value.what.splitlines()[0])
    return [restored.step, *refusals]


def damage(checkpoints: CheckpointManager, step: int, rank: int) -> None:
    file = checkpoints.run.checkpoints / f"step-{step:08d}" / f"__{rank}_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    checkpoints._of_all_ranks({})  # until all have


def test_a_damaged_one_is_set_aside_and_none_left_is_an_error(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=zero2", "model.n_layers=1")
    none = "no checkpoint of this run is good:"
    assert run_ranks(2, damage_and_restore, str(run.path)) == [[1, none, none]] * 2
    told = [
        (event["step"], event["message"]) for event in run.read_events() if event["event"] == "checkpoint_set_aside"
    ]
    assert [step for step, _ in told] == [2, 1]
    assert all("its content is not what was written" in message for _, message in told)


def test_the_space_is_looked_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        commit(store, step)
    found = os.statvfs_result((4096, 4096, 100, 100, 100_000_000, 9, 9, 9, 0, 255))
    monkeypatch.setattr(space.os, "statvfs", lambda path: found)
    space.check_space(tmp_path, store, 400_000_000_000, 2, keep=3)
    with pytest.raises(OSError, match="needs 510 GB, 410 GB free") as caught:
        space.check_space(tmp_path, store, 500_000_000_000, 2, keep=3)
    assert "would fit" not in str(caught.value)
    with pytest.raises(OSError, match=r"needs 410 GB, 410 GB free, keep=2 would fit"):
        space.check_space(tmp_path, store, 401_568_501_891, 2, keep=3)
    with pytest.raises(OSError, match="needs 20 inodes, 9 free"):
        space.check_space(tmp_path, store, 5, 20, keep=3)


def test_the_manager_names_no_second_way_to_the_disk() -> None:
    """All changes go through ``disk``, so that what is injected here is all there is."""
    for module in (manager, space):
        assert module.__file__ is not None
        text = Path(module.__file__).read_text()
        assert not [word for word in (".rename(", ".mkdir(", ".unlink(", "rmtree", ".write_text(") if word in text]
