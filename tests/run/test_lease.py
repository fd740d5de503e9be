"""The lease of a run with real processes: races, a killed holder, one that is asleep, machines and jobs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_train.errors import UserError
from hpc_train.run import file_lock, lease
from hpc_train.run.directory import RunDirectory, lease_folder
from hpc_train.run.file_lock import STALE_S, LockOwner, newest_lock, superseded

FORK = multiprocessing.get_context("fork")
LIMIT_S = 100.0


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def process(target: Callable[..., None], *args: Any) -> Iterator[Any]:
    child = FORK.Process(target=target, args=args)
    child.start()
    try:
        yield child
    finally:
        child.kill()
        child.join()


def elsewhere(**fields: Any) -> LockOwner:
    """This process as if it were one of another machine."""
    return replace(LockOwner.of_this_process(), machine="another", host="far", **fields)


def count(path: Path, times: int) -> None:
    for _ in range(times):
        with file_lock.exclusive(path / "turns"):
            number = int((path / "count").read_text())
            time.sleep(0.001)
            (path / "count").write_text(f"{number + 1}")


def test_one_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "count").write_text("0")
    children = [FORK.Process(target=count, args=(tmp_path, 10)) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(LIMIT_S)
    assert (tmp_path / "count").read_text() == "40"
    assert {path.name for path in tmp_path.iterdir()} == {"count"}, "a short lock leaves nothing"


def test_a_number_that_another_process_has_taken_again_is_respected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = LockOwner.of_this_process()
    first = file_lock.acquire(tmp_path, here)
    first.release()
    create = file_lock._create

    def create_after_others(lock: file_lock.Lock, owner: LockOwner) -> bool:
        if lock.number == 2:
            first.path.unlink()
            assert create(first, here), "another process takes the number of the lock that was just removed"
        return create(lock, owner)

    monkeypatch.setattr(file_lock, "_create", create_after_others)
    with pytest.raises(file_lock.LockHeld):
        file_lock.acquire(tmp_path, here)
    assert [path.name for path in tmp_path.iterdir()] == ["00000001"]


def test_a_lock_whose_file_was_removed_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder removes all numbers up to its own."""
    create = file_lock._create
    created = []

    def create_and_lose_the_first(lock: file_lock.Lock, owner: LockOwner) -> bool:
        created.append(create(lock, owner))
        if len(created) == 1:
            lock.path.unlink()
        return created[-1]

    monkeypatch.setattr(file_lock, "_create", create_and_lose_the_first)
    assert file_lock.acquire(tmp_path, LockOwner.of_this_process()).path.exists()
    assert created == [True, True]


def test_a_lease_leaves_nothing_unless_its_holder_was_passed_over(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with lease.hold_lease(run):
        assert [path.name for path in lease_folder(tmp_path).iterdir()] == ["00000001"]
    assert not list(lease_folder(tmp_path).iterdir())
    here = LockOwner.of_this_process()
    lost = file_lock.acquire(lease_folder(tmp_path), elsewhere())
    os.utime(lost.path, (time.time() - STALE_S - 1,) * 2)
    with lease.hold_lease(run):
        pass
    lost.beat()  # it awakes
    assert superseded(lease_folder(tmp_path), elsewhere()) == file_lock.Lock(lost.folder, 2)
    assert newest_lock(lost.folder) == file_lock.Lock(lost.folder, 2)
    with pytest.raises(file_lock.LockHeld):
        file_lock.acquire(lost.folder, here)


def test_a_holder_that_a_stale_list_hides_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client whose list still shows an earlier, removed number 2 takes number 3 while another process holds 1."""
    folder = tmp_path / ".locks" / "record"
    holder = file_lock.acquire(folder, elsewhere())
    lists = [[2]]
    real = file_lock._lock_numbers
    monkeypatch.setattr(file_lock, "_lock_numbers", lambda folder: lists.pop() if lists else real(folder))
    with pytest.raises(file_lock.LockHeld):
        file_lock.acquire(folder, LockOwner.of_this_process(), ask_slurm=False)
    assert [path.name for path in folder.iterdir()] == ["00000001"]
    os.utime(holder.path, (time.time() - STALE_S - 1,) * 2)
    with file_lock.exclusive(folder):
        file_lock._remove(holder, elsewhere())  # it wakes up after it was passed over
        assert [path.name for path in folder.iterdir()] == ["00000002"]
    assert not folder.parent.exists() and tmp_path.exists()


def keep(path: Path, reported: Any = None, **options: Any) -> None:
    lost = FORK.Event()
    with lease.hold_lease(RunDirectory(path), on_loss=lost.set, beat_s=0.05, **options):
        (path / "held").touch()
        lost.wait()
    if reported is not None:
        try:
            RunDirectory(path).claim_attempt(options.get("owner"))
        except UserError as error:
            reported.put(error.what)


def race(path: Path, start: Any, won: Any, over: Any) -> None:
    start.wait()
    try:
        with lease.hold_lease(RunDirectory(path)):
            won.put(os.getpid())
            over.wait(LIMIT_S)
    except UserError:
        won.put(None)


def test_a_killed_holder_is_followed_by_one(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with process(keep, tmp_path) as holder:
        until((tmp_path / "held").exists)
        assert lease.is_live(run)
        with pytest.raises(UserError, match="is live"), lease.hold_lease(run):
            pass
        os.kill(holder.pid, signal.SIGKILL)
        holder.join()
    assert not lease.is_live(run)
    start, won, over = FORK.Event(), FORK.Queue(), FORK.Event()
    children = [FORK.Process(target=race, args=(tmp_path, start, won, over)) for _ in range(8)]
    for child in children:
        child.start()
    start.set()
    found = [won.get(timeout=LIMIT_S) for _ in children]
    over.set()
    for child in children:
        child.join(LIMIT_S)
    assert len([pid for pid in found if pid is not None]) == 1
    assert not lease.is_live(run)


def test_a_holder_that_is_asleep(tmp_path: Path) -> None:
    """On its own machine it is alive. From another one it is dead when it has been silent for long; when it wakes up it
    learns that it was passed over, and changes nothing."""
    run, reported = RunDirectory(tmp_path), FORK.Queue()
    with process(keep, tmp_path, reported) as holder:
        until((tmp_path / "held").exists)
        os.kill(holder.pid, signal.SIGSTOP)
        until(lambda: Path(f"/proc/{holder.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        with pytest.raises(UserError, match=f"process {holder.pid} on"), lease.hold_lease(run, owner=elsewhere()):
            pass
        turn = newest_lock(lease_folder(tmp_path))
        assert turn is not None
        long_ago = time.time() - STALE_S - 1
        os.utime(turn.path, (long_ago, long_ago))
        assert lease.is_live(run)
        with lease.hold_lease(run, owner=elsewhere()):
            assert run.claim_attempt(elsewhere()) == 0
            os.kill(holder.pid, signal.SIGCONT)
            assert reported.get(timeout=LIMIT_S).startswith(f"{elsewhere()} has taken over the run")
            holder.join(LIMIT_S)
            assert holder.exitcode == 0
            found = newest_lock(lease_folder(tmp_path))
            assert found is not None and found.is_held(elsewhere(pid=1)), "what the other gave back was not its own"
    assert run.newest_attempt() == 0


def test_silence_is_counted_by_the_clock_of_the_file_server(tmp_path: Path) -> None:
    other = elsewhere()
    turn = file_lock.acquire(tmp_path, other)
    assert turn.silent_s() < LIMIT_S
    here = LockOwner.of_this_process()
    assert turn.is_held(here)
    os.utime(turn.path, (time.time() - STALE_S - 1,) * 2)
    assert not turn.is_held(here)
    turn.beat()
    assert turn.is_held(here)
    assert [path.name for path in tmp_path.iterdir()] == ["00000001"]


def test_a_turn_that_says_nothing_yet(tmp_path: Path) -> None:
    (tmp_path / "00000004").touch()
    turn = newest_lock(tmp_path)
    assert turn is not None and turn.owner() is None
    assert turn.is_held(LockOwner.of_this_process())
    os.utime(turn.path, (time.time() - STALE_S - 1,) * 2)
    assert file_lock.acquire(tmp_path, LockOwner.of_this_process()).number == 5


def test_a_turn_taken_by_an_old_list_is_no_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of a network file system may show a list of a minute ago."""
    here = LockOwner.of_this_process()
    for _ in range(12):
        file_lock.acquire(tmp_path, here).release()
    lists = [[1], *[[*range(5, 13)]] * 5]
    real = file_lock._lock_numbers
    monkeypatch.setattr(file_lock, "_lock_numbers", lambda folder: lists.pop(0) if lists else real(folder))
    assert file_lock.acquire(tmp_path, here).number == 13


@pytest.mark.parametrize("same_machine", [False, True])
def test_the_same_job_started_again_needs_no_patience(tmp_path: Path, same_machine: bool) -> None:
    """Slurm has given the first start up, although its process may still exist on a frozen node."""
    here = replace(LockOwner.of_this_process(), job_id="17", cluster="one")
    first = here if same_machine else elsewhere(job_id="17", cluster="one")
    turn = file_lock.acquire(tmp_path, first)
    assert turn.is_held(replace(here, restart=0))
    assert not turn.is_held(replace(here, restart=1))
    assert turn.is_held(replace(here, restart=1, cluster="two")), "another job with the same id"


@pytest.mark.parametrize(
    ("answer", "held"),
    [
        ("echo RUNNING", True),
        ("echo SUSPENDED", True),
        ("echo PENDING", False),
        ("echo FAILED", False),
        ("true", False),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", False),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", True),
    ],
)
def test_a_job_elsewhere_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, held: bool) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\n{answer}\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    turn = file_lock.acquire(tmp_path / "turns", elsewhere(job_id="17", cluster="one"))
    here = LockOwner.of_this_process()
    assert turn.is_held(here) is held
    assert turn.is_held(replace(here, cluster="two"))  # where another job has that number
    os.utime(turn.path, (time.time() - STALE_S - 1,) * 2)
    assert turn.is_held(here) is (answer == "echo SUSPENDED")
