"""A file system that is really full, wherever a save notices: at a write, a flush, the metadata or the manifest."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_train.checkpoint.manager import CheckpointManager
from hpc_train.checkpoint.manifest import verify
from hpc_train.checkpoint.writer import SaveFailed
from tests.checkpoint.training import make_manager
from tests.ranks import run_ranks
from tests.train.runs import frozen

PAGE = 4096


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip("nothing can be mounted here")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def fill(disk: Path, pages_left: int) -> None:
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "ballast").write_bytes(bytes(max(0, free - pages_left * PAGE)))


def save_on_less_and_less(rank: int, world_size: int, path: str) -> list[str | None]:
    """What was told of each save, with one page more left than for the one before."""
    disk, checkpoints, told = Path(path).parent, make_manager(rank, world_size, path), list[str | None]()

    def somebody_fills_it(self: CheckpointManager, writing: Path, tensor_bytes: int, files: int) -> None:
        fill(disk, len(told))

    CheckpointManager._check_space = somebody_fills_it  # type: ignore[method-assign]
    step = 0
    while not told or told[-1] is not None:
        step += 1
        before = checkpoints.store.committed()
        try:
            checkpoints.save(step, {}, final=True)
            told.append(None)
        except SaveFailed as error:
            told.append(str(error))
            assert checkpoints.store.committed() == before
        (disk / "ballast").unlink(missing_ok=True)
    (newest,) = checkpoints.store.committed()
    verify(newest.path, newest.manifest())
    return told


def test_wherever_a_save_finds_the_disk_full_it_says_so(small_disk: Path) -> None:
    run = frozen(small_disk / "run", "+strategy=zero2", "model.n_layers=1", "optim=sgd", "optim.momentum=0")
    first, second = run_ranks(2, save_on_less_and_less, str(run.path))
    assert first == second and first[-1] is None
    assert len(first) > 8
    assert all("No space left on device" in str(told) for told in first[:-1]), first
