"""Errors of the file system at every call of a save, on each rank, and an attempt that was overtaken."""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from collections.abc import Callable
from itertools import count, cycle
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hpc_train.checkpoint import disk, manager, space
from hpc_train.checkpoint.manager import CheckpointManager
from hpc_train.checkpoint.manifest import verify
from hpc_train.checkpoint.run_store import Superseded
from hpc_train.checkpoint.store import CheckpointStore, Retention
from hpc_train.checkpoint.writer import SaveFailed
from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from tests.checkpoint.progress import LONG
from tests.checkpoint.tiny import LIMIT_S, commit
from tests.checkpoint.training import make_manager
from tests.ranks import run_on_world, run_ranks
from tests.train.runs import frozen

pytestmark = pytest.mark.timeout(LIMIT_S + 50)

CODES = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EACCES, errno.ESTALE, errno.EROFS)
CALLS = ("make_directory", "create", "write", "sync", "sync_directory", "rename", "remove")
EXTRA = {"tokens": 0, "loss_scale": None}


class Fault:
    """Lets the ``nth`` call of ``disk`` at ``site`` fail; counts the calls at each site.

    A site is what is called and for which kind of file, as in ``write __#_#.distcp``.
    """

    def __init__(self, site: str = "", nth: int = 0, code: int = 0) -> None:
        self.site, self.nth, self.code = site, nth, code
        self.counts: Counter[str] = Counter()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in CALLS:
            patch.setattr(disk, name, self.wrapped(name, getattr(disk, name)))

    def wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any, *args: Any) -> Any:
            site = f"{name} {kind_of(target)}"
            self.counts[site] += 1
            if site == self.site and self.counts[site] == self.nth:
                raise OSError(self.code, os.strerror(self.code))
            return original(target, *args)

        return call


def kind_of(target: Any) -> str:
    """The name of a path, open file or descriptor, without its numbers."""
    path = Path(f"/proc/self/fd/{target}").readlink() if isinstance(target, int) else getattr(target, "name", target)
    return re.sub(r"\d+", "#", Path(path).name)


def try_to_save(checkpoints: CheckpointManager, step: int, fault: Fault) -> str | None:
    with pytest.MonkeyPatch.context() as patch:
        fault.install(patch)
        try:
            checkpoints.save(step, EXTRA, final=True)
        except SaveFailed as error:
            return str(error)
        finally:
            checkpoints.close(lambda: False)  # until rank 0 has removed the old ones
            dist.barrier()
    return None


def fail_everywhere(rank: int, world_size: int, path: str) -> tuple[list[str], list[str]]:
    """The sites, and what was wrong, for each call that was made to fail on rank 0 and then on rank 1."""
    os.fsync = lambda descriptor: None
    checkpoints, steps = make_manager(rank, world_size, path), count(1)
    for _ in range(3):  # the third is the first one that removes
        counted = Fault()
        assert try_to_save(checkpoints, next(steps), counted) is None
    sites = of_all_ranks(counted.counts)
    wrong = []
    codes = cycle(CODES)
    first_or_last = cycle((0, 1))
    for victim in range(world_size):
        for site, calls in sites[victim].items():
            for nth in range(1, calls + 1) if LONG else [next(first_or_last) * (calls - 1) + 1]:
                for code in CODES if LONG else [next(codes)]:
                    fault = Fault(site if rank == victim else "", nth, code)
                    problem = fail_once(checkpoints, next(steps), fault, os.strerror(code))
                    if problem is not None:
                        wrong.append(f"call {nth} of {site} on rank {victim}, {os.strerror(code)}: {problem}")
                if try_to_save(checkpoints, next(steps), Fault()) is not None:
                    wrong.append(f"no save after {site} failed on rank {victim}")
    return [*counted.counts], wrong


def fail_once(checkpoints: CheckpointManager, step: int, fault: Fault, words: str) -> str | None:
    """A save with ``fault``; says what is wrong with its outcome."""
    before = checkpoints.store.committed()
    reported = try_to_save(checkpoints, step, fault)
    after = checkpoints.store.committed()
    if of_all_ranks(reported) != [reported] * dist.get_world_size():
        return f"not reported alike on all ranks: {reported}"
    if reported is None:  # it was in the removal of old ones, after the commit
        return None if after[-1].step == step else f"not reported, and not committed: {after}"
    if words not in reported or after != before:
        return f"{reported}: {before} became {after}"
    verify(after[-1].path, after[-1].manifest())
    return None


def of_all_ranks(own: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


SITES = {  # of rank 0; the others write their files only
    "make_directory .step-#.attempt-#.#",
    "create __#_#.distcp", "write __#_#.distcp", "sync __#_#.distcp",
    "create .metadata", "write .metadata", "sync .metadata", "create manifest.json", "write manifest.json",
    "sync manifest.json", "sync_directory .step-#.attempt-#.#", "sync .step-#.attempt-#.#",
    "rename .step-#.attempt-#.#", "sync_directory checkpoints", "sync checkpoints", "rename step-#",
    "remove .step-#.removed",
}  # fmt: skip


def test_any_error_at_any_call_is_told_on_every_rank_and_the_next_save_succeeds(tmp_path: Path) -> None:
    small = ("model.n_layers=1", "optim=sgd", "optim.momentum=0")
    run = frozen(tmp_path / "run", "+strategy=zero2", *small)
    (first, wrong), (second, wrong_too) = run_ranks(2, fail_everywhere, str(run.path), timeout=LIMIT_S)
    assert wrong == wrong_too == []
    assert set(first) == SITES
    assert set(second) == {site for site in SITES if site.endswith(".distcp")}
    events = run.read_events()
    failed = [event for event in events if event["event"] == "checkpoint_failed"]
    assert {int(event["message"].split("[Errno ")[1].split("]")[0]) for event in failed} == set(CODES)


@pytest.mark.parametrize("code", CODES)
def test_what_cannot_be_removed_stays_hidden_until_it_can(tmp_path: Path, code: int) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        commit(store, step)

    def failing(*args: Any, **kwargs: Any) -> None:
        raise OSError(code, os.strerror(code))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "unlink", failing)
        store.prune(Retention(1), attempt=0)
    assert [found.step for found in store.committed()] == [3]
    assert sorted(path.name for path in tmp_path.glob(".*")) == [".step-00000001.removed", ".step-00000002.removed"]
    store.prune(Retention(1), attempt=0)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def wake_up_late(rank: int, world_size: int, path: str) -> list[str]:
    checkpoints = make_manager(rank, world_size, path)
    checkpoints.save(1, EXTRA)
    run = RunDirectory(Path(path))
    if rank == 0:
        run.claim_attempt()
        run.claim_attempt()  # number 1: newer than this attempt
        for file in (run.checkpoints / "step-00000001").glob("__*"):
            file.write_bytes(b"damaged")
    reported = []
    for act in (lambda: checkpoints.save(2, EXTRA), checkpoints.restore):
        with pytest.raises(Superseded) as caught:
            dist.barrier(checkpoints._group)  # one after the other
            act()
        reported.append(str(caught.value))
    return reported


def test_an_overtaken_attempt_changes_nothing(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=dp", "model.n_layers=1")
    words = "attempt 1 has taken over the run from attempt 0"
    assert run_on_world(2, wake_up_late, str(run.path)) == [[words] * 2] * 2
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
        with pytest.raises(UserError) as caught:
            again.restore()
        refusals.append(caught.value.what.splitlines()[0])
    return [restored.step, *refusals]


def damage(checkpoints: CheckpointManager, step: int, rank: int) -> None:
    file = checkpoints.store.root / f"step-{step:08d}" / f"__{rank}_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    dist.barrier(checkpoints._group)  # until all have


def test_a_damaged_one_is_set_aside_and_none_left_is_an_error(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=zero2", "model.n_layers=1")
    none = "all checkpoints of this run are damaged:"
    assert run_on_world(2, damage_and_restore, str(run.path)) == [[1, none, none]] * 2
    reported = [
        (event["step"], event["message"]) for event in run.read_events() if event["event"] == "checkpoint_set_aside"
    ]
    assert [step for step, _ in reported] == [2, 1]
    assert all("the content does not match its checksum" in message for _, message in reported)


def test_the_space_is_looked_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        commit(store, step)
    found = os.statvfs_result((4096, 4096, 100, 100, 100_000_000, 9, 9, 9, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    space.check_space(tmp_path, store, 400_000_000_000, 2, keep=3)
    with pytest.raises(OSError, match="needs 475 GiB, 381 GiB free") as caught:
        space.check_space(tmp_path, store, 500_000_000_000, 2, keep=3)
    assert "would fit" not in str(caught.value)
    with pytest.raises(OSError, match=r"needs 381 GiB, 381 GiB free, checkpoint.keep=2 would fit"):
        space.check_space(tmp_path, store, 401_568_501_891, 2, keep=3)
    with pytest.raises(OSError, match="needs 20 inodes, 9 free"):
        space.check_space(tmp_path, store, 5, 20, keep=3)


def test_the_manager_names_no_second_way_to_the_disk() -> None:
    """All changes go through ``disk``, so that what is injected here is all there is."""
    for module in (manager, space):
        assert module.__file__ is not None
        text = Path(module.__file__).read_text()
        assert not [word for word in (".rename(", ".mkdir(", ".unlink(", "rmtree", ".write_text(") if word in text]
