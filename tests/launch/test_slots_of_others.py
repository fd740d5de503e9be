"""The lock files of GPUs and cores in /tmp, when other users have been there before."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_train.launch.executors import executor
from hpc_train.launch.executors.executor import Share, reserve, shared_directory, take
from tests.other_user import OTHER, as_other, common, needs_root, start_as_other

__all__ = ["common"]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    mask, cores = os.umask(0o022), os.sched_getaffinity(0)
    yield
    os.umask(mask)
    os.sched_setaffinity(0, cores)


@pytest.fixture
def machine(common: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(common))
    return common / "hpc_train-slots"


def never() -> bool:
    return False


def reserve_one_core(sweep: Path) -> None:
    sweep.mkdir(exist_ok=True)
    cores = os.sched_getaffinity(0)
    with reserve(Share(0, 1, str(sweep), 1), never):
        assert len(os.sched_getaffinity(0)) == 1
    os.sched_setaffinity(0, cores)


@needs_root
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_the_next_user_can_lock_what_the_first_one_has_made(
    machine: Path, common: Path, umask: int, capfd: pytest.CaptureFixture[str]
) -> None:
    def first() -> None:
        os.umask(umask)
        reserve_one_core(common / "other")

    as_other(first)
    assert stat.S_IMODE(machine.stat().st_mode) == 0o1777
    assert {stat.S_IMODE(path.stat().st_mode) for path in machine.iterdir()} == {0o644}
    reserve_one_core(common / "own")
    assert {path.stat().st_uid for path in machine.iterdir()} == {OTHER}
    assert "warning" not in capfd.readouterr().err


def other_directory(path: Path) -> None:
    path.mkdir(mode=0o700)


def without_sticky_bit(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def unreadable_gate(path: Path) -> None:
    shared_directory()
    (path / "gate-core").touch(mode=0o600)


def dangling_link(path: Path) -> None:
    shared_directory()
    (path / "gate-core").symlink_to(path / "nowhere")


def link_to_a_file(path: Path) -> None:
    shared_directory()
    (path / "gate-core").symlink_to("/etc/passwd")


def pipe(path: Path) -> None:
    shared_directory()
    os.mkfifo(path / "gate-core", 0o666)


def linked_directory(path: Path) -> None:
    path.symlink_to("/")


def plain_file(path: Path) -> None:
    path.touch()


@needs_root
@pytest.mark.parametrize(
    "attack", [without_sticky_bit, dangling_link, link_to_a_file, pipe, linked_directory, plain_file]
)
def test_unusable_locks_are_told_once_and_the_job_goes_on(
    machine: Path, common: Path, attack: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    as_other(lambda: attack(machine))
    reserve_one_core(common / "own")
    assert capfd.readouterr().err.count("warning") == 1
    assert not (machine / "nowhere").exists()
    assert (common / "own" / ".slots" / "gate-core").exists(), "the jobs of the sweep are still kept apart"


@needs_root
@pytest.mark.parametrize("attack", [other_directory, unreadable_gate])
def test_what_another_user_keeps_private_is_no_error(
    machine: Path, common: Path, attack: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    attack(machine)  # as root, whose files the other user cannot open
    as_other(lambda: reserve_one_core(common / "other"))
    assert capfd.readouterr().err.count("warning") == 1


@needs_root
def test_a_gate_that_is_held_for_nothing_is_passed(
    machine: Path, common: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(executor, "GATE_S", 0.3)
    reserve_one_core(common / "own")
    ready, release = os.pipe(), os.pipe()

    def hold() -> None:
        descriptor = os.open(machine / "gate-core", os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(ready[1], b".")
        os.read(release[0], 1)

    wait = start_as_other(hold)
    os.read(ready[0], 1)
    reserve_one_core(common / "own")
    assert "takes nothing" in capfd.readouterr().err
    with take(machine, ["core-0"], 1, never) as held:
        assert held == ["core-0"]
        end = time.monotonic() + 1.0
        with take(machine, ["core-0"], 1, lambda: time.monotonic() > end) as second:
            assert second == [], "a gate is passed only while the locks are free"
    os.write(release[1], b".")
    wait()
    for descriptor in (*ready, *release):
        os.close(descriptor)
