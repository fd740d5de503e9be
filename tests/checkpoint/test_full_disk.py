"""A file system that is really full, wherever a save notices: at a write, a flush, the metadata or the manifest."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hpc_train.checkpoint.manager import CheckpointManager
from hpc_train.checkpoint.manifest import verify
from hpc_train.checkpoint.writer import SaveFailed
from hpc_train.commands import why
from hpc_train.run.directory import RunDirectory
from tests.checkpoint.training import make_manager
from tests.doors.command import TINY, start
from tests.ranks import run_ranks
from tests.train.runs import frozen

PAGE = 4096


@contextmanager
def mounted(disk: Path, megabytes: int) -> Iterator[Path]:
    """A file system of its own."""
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", megabytes=1) as disk:
        yield disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """With room for a few checkpoints."""
    with mounted(tmp_path / "disk", megabytes=8) as disk:
        yield disk


def fill(disk: Path, pages_left: int) -> None:
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "ballast").write_bytes(bytes(max(0, free - pages_left * PAGE)))


def save_on_less_and_less(rank: int, world_size: int, path: str) -> list[str | None]:
    """What was reported of each save, with one page more left than for the one before."""
    disk, checkpoints, reported = Path(path).parent, make_manager(rank, world_size, path), list[str | None]()

    def somebody_fills_it(self: CheckpointManager, writing: Path, tensor_bytes: int, files: int) -> None:
        fill(disk, len(reported))

    CheckpointManager._check_space = somebody_fills_it  # type: ignore[method-assign]
    step = 0
    while not reported or reported[-1] is not None:
        step += 1
        before = checkpoints.store.committed()
        try:
            checkpoints.save(step, {}, final=True)
            reported.append(None)
        except SaveFailed as error:
            reported.append(str(error))
            assert checkpoints.store.committed() == before
        (disk / "ballast").unlink(missing_ok=True)
    (newest,) = checkpoints.store.committed()
    verify(newest.path, newest.manifest())
    return reported


@pytest.mark.long_form(8)  # test_errors has this error at each call of a save
def test_wherever_a_save_finds_the_disk_full_it_says_so(small_disk: Path) -> None:
    run = frozen(small_disk / "run", "+strategy=zero2", "model.n_layers=1", "optim=sgd", "optim.momentum=0")
    first, second = run_ranks(2, save_on_less_and_less, str(run.path))
    assert first == second and first[-1] is None
    assert len(first) > 8
    assert all("No space left on device" in str(reported) for reported in first[:-1]), first


class Filled:
    """A training in the foreground, 0.2 s per step, whose disk is filled after its first ``event``."""

    def __init__(self, disk: Path, *more: str, event: str = "checkpoint_saved") -> None:
        small = ["model=custom", "model._target_=tests.doors.faulty.Slow", "+model.args.vocab_size=256", "optim=sgd"]
        case = [*(value for value in TINY if not value.startswith("model")), *small, "train.steps=8", *more]
        saves = ["checkpoint.keep=1", "cluster=local", "cluster.cpu_workers=2"]
        saves += [] if any("checkpoint.every" in value for value in more) else ["checkpoint.every=2"]
        self.disk, self.run = disk, RunDirectory(disk / "run")
        self.process = start("+strategy=dp", *case, *saves, "run.name=run", f"run.root={disk}", cwd=disk.parent)
        self.until(event)
        fill(disk, 20)

    def until(self, event: str, count: int = 1) -> None:
        limit = time.monotonic() + 120
        while sum(found["event"] == event for found in self.run.read_events()) < count:
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < limit, self.run.read_events()
            time.sleep(0.05)

    def make_room(self) -> None:
        (self.disk / "ballast").unlink()

    def end(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=120)
        return self.process.returncode, output

    def waits(self) -> list[float]:
        return [event["seconds"] for event in self.run.read_events() if event["event"] == "save_deferred"]


@pytest.mark.long_form(10)  # test_errors.py fails at each call of a save
def test_saves_that_fail_are_shown_and_the_last_one_waits_for_room(disk: Path, called: Callable[..., Any]) -> None:
    filled = Filled(disk)
    filled.until("checkpoint_failed")
    status = called("status", str(filled.run.path), "--json")
    filled.until("save_deferred")
    filled.make_room()
    code, output = filled.end()
    assert code == 0, output
    first = (
        r"^saving has failed since step \d: rank 0: the checkpoint needs .* free: .*; training continues, but a failure"
    )
    assert re.search(rf"{first} would lose the steps after checkpoint \d$", output, re.M), output
    assert json.loads(status.stdout)["failed_saves"] > 0
    assert "the last save, of step 8, failed: rank 0: the checkpoint needs " in output
    assert f"retrying for up to 600 s: free some space in {filled.run.checkpoints}; otherwise the run fails" in output
    assert "saving works again: checkpoint of step 8 is saved after " in output
    assert output.count("saving has failed since") == 1, "those after the first are counted"
    assert [path.name for path in filled.run.checkpoints.glob("step-*")] == ["step-00000008"]


@pytest.mark.long_form(10)
def test_without_room_in_time_the_run_fails_and_rank_0_is_named(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled = Filled(disk, "checkpoint.wait_for_room_s=1.5")
    code, output = filled.end()
    assert code == 1, output
    assert re.search(
        r"rank 0 on \S+ failed \(disk_full\):\nrank 0: OSError: \[Errno 28\] the checkpoint needs", output
    ), output
    assert "Traceback" not in output
    assert 0 < filled.waits()[0] <= 1.5
    assert why.main([str(filled.run.path)]) == 0
    told = capsys.readouterr().out
    assert "failure\n  disk_full, rank 0 on " in told
    for said in (output, told):
        assert "another run.root; earlier checkpoints are intact" in " ".join(said.split())


@pytest.mark.long_form(10)
def test_the_advice_knows_whether_there_is_a_checkpoint(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled = Filled(disk, "checkpoint.wait_for_room_s=1", "checkpoint.every=100", event="started")
    code, output = filled.end()
    assert code == 1 and not [*filled.run.checkpoints.glob("step-*")], output
    assert why.main([str(filled.run.path)]) == 0
    for said in (output, capsys.readouterr().out):
        assert "another run.root; there is no checkpoint, so the run starts again at step 0" in " ".join(said.split())
        assert "intact" not in said


@pytest.mark.long_form(15)
@pytest.mark.parametrize(("room", "code"), [(True, 75), (False, 1)])
def test_a_stop_request_is_obeyed_while_the_last_save_waits(disk: Path, room: bool, code: int) -> None:
    """For what is left of the grace. It comes in the middle of the training, or when the last save waits already."""
    filled = Filled(disk, "elastic.stop_grace_s=8", "checkpoint.wait_for_room_s=300")
    filled.until("checkpoint_failed" if room else "save_deferred")
    filled.process.send_signal(signal.SIGINT)
    asked = time.monotonic()
    if room:
        filled.until("save_deferred")
        filled.make_room()
    ended, output = filled.end()
    assert ended == code, output
    assert filled.waits()[-1] <= 6.0, "a quarter of the grace is for leaving"
    if not room:
        assert "failed (disk_full)" in output and "did not stop" not in output, output
        assert time.monotonic() - asked < 60
        assert filled.waits()[0] > 100
