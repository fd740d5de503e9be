"""Jobs on this machine: how many at once, with which GPUs and cores, in separate sessions, with which exit."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from hpc_train.config.schema import ClusterConfig
from hpc_train.launch.executors.local import LocalJobExecutor, SessionExecutor, Share, jobs_at_once, reserve, take
from hpc_train.run.requests import watch_signals
from tests.launch.jobs import make_job

NAMES = ["gpu-0", "gpu-1", "gpu-2"]


@pytest.fixture
def cores() -> Iterator[set[int]]:
    """The cores of this process, which has them again after the test."""
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


def never() -> bool:
    return False


def at_once(folder: Path, count: int) -> list[str]:
    """What can be had without waiting."""
    answers = iter([False, False, False, True])
    with take(folder, NAMES, count, lambda: next(answers, True)) as held:
        return held


def test_two_holders_never_share(tmp_path: Path) -> None:
    with take(tmp_path, NAMES, 2, never) as first:
        assert first == ["gpu-0", "gpu-1"]
        assert at_once(tmp_path, 1) == ["gpu-2"]
        assert at_once(tmp_path, 2) == []
        assert at_once(tmp_path, 1) == ["gpu-2"], "a wait in vain holds nothing afterwards"
    assert at_once(tmp_path, 3) == NAMES


def hold(folder: Path, ready: Event) -> None:
    with take(folder, NAMES, 3, never):
        ready.set()
        time.sleep(60)


def test_a_killed_holder_gives_back(tmp_path: Path) -> None:
    processes = multiprocessing.get_context("fork")
    ready = processes.Event()
    holder = processes.Process(target=hold, args=(tmp_path, ready))
    holder.start()
    assert ready.wait(60)
    assert at_once(tmp_path, 1) == []
    holder.kill()
    holder.join()
    assert at_once(tmp_path, 3) == NAMES


def test_a_job_sees_only_the_cores_that_it_holds(tmp_path: Path, cores: set[int]) -> None:
    with reserve(Share(0, 1, str(tmp_path), 1), never):
        assert len(os.sched_getaffinity(0)) == 1


def test_a_job_sees_only_the_gpus_that_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_train.launch.executors.local.visible_devices", lambda: ("0", "1", "GPU-abc"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,GPU-abc")
    (tmp_path / ".slots").mkdir()
    with take(tmp_path / ".slots", ["gpu-0"], 1, never), reserve(Share(2, 0, str(tmp_path), 1), never):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,GPU-abc"


@pytest.mark.usefixtures("cores")
def test_a_sweep_keeps_to_its_cap(tmp_path: Path) -> None:
    answers = iter([False, False, True, True])
    with (
        reserve(Share(gpus=0, cores=1, sweep=str(tmp_path), at_once=1), never),
        take(tmp_path / ".slots", ["slot-0"], 1, answers.__next__) as turn,
    ):
        assert turn == []


def test_two_sweeps_do_not_wait_for_each_other(tmp_path: Path, cores: set[int]) -> None:
    first, second = (Share(0, len(cores), str(tmp_path / name), 1) for name in ("first", "second"))
    for share in (first, second):
        Path(share.sweep).mkdir()
    with reserve(first, never), reserve(second, never):
        assert os.sched_getaffinity(0) == cores


def test_a_job_runs_without_locks_that_cannot_be_used(
    tmp_path: Path, cores: set[int], capsys: pytest.CaptureFixture[str]
) -> None:
    slots = tmp_path / ".slots"
    slots.mkdir()
    (slots / f"core-{min(cores)}").symlink_to("elsewhere")
    with reserve(Share(0, 1, str(tmp_path), 1), never):
        assert os.sched_getaffinity(0) == cores
    assert "does not wait for others of its sweep" in capsys.readouterr().err


def test_jobs_that_each_need_most_of_the_gpus_run_one_after_the_other(tmp_path: Path) -> None:
    """None waits for ever with a part of what another one needs."""
    held: list[list[str]] = []

    def job() -> None:
        for _ in range(5):
            with take(tmp_path, NAMES, 2, never) as names:
                held.append(names)

    threads = [threading.Thread(target=job) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [len(names) for names in held] == [2] * 15


@pytest.mark.parametrize(
    ("count", "workers", "cores", "cap", "expected"),
    [
        (4, 4, 2, "auto", 1),  # one job uses more workers than there are cores
        (4, 1, 2, "auto", 2),
        (4, 2, 8, "auto", 4),
        (6, 2, 8, "auto", 4),
        (1, 1, 8, "auto", 1),
        (6, 4, 2, 3, 3),  # the user's cap is the user's
        (2, 4, 2, 5, 2),
    ],
)
def test_jobs_at_once_on_cores(
    tmp_path: Path, count: int, workers: int, cores: int, cap: int | str, expected: int
) -> None:
    cluster = ClusterConfig(cpu_workers=workers)
    jobs = [make_job(tmp_path, number, cluster=cluster, cap=cap) for number in range(count)]
    assert jobs_at_once(jobs, cores, gpus=0) == expected


def test_a_sweep_says_how_many_jobs_train_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    jobs = [make_job(tmp_path / "sweep", number) for number in range(3)]
    assert LocalJobExecutor().check(jobs) == ["this machine (2 cores) trains 1 job at a time; the others wait"]
    assert LocalJobExecutor().check(jobs[:1]) == []


def test_jobs_at_once_on_gpus(tmp_path: Path) -> None:
    jobs = [make_job(tmp_path, number, gpus=8, dp=2) for number in range(6)]
    assert jobs_at_once(jobs, cores=2, gpus=8) == 4


def tell_session(path: str) -> None:
    with watch_signals() as stop:
        while not stop.requested:
            time.sleep(0.01)
    Path(path).write_text(f"{os.getsid(0)} {os.environ.get('CUDA_VISIBLE_DEVICES')} {stop.reason}")


def test_a_job_has_its_own_session_sees_the_gpus_and_gets_a_signal_that_arrives_before_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    reported = tmp_path / "reported"
    job = SessionExecutor(tmp_path / "submitit", {}).submit(tell_session, str(reported))
    os.kill(int(job.job_id), signal.SIGTERM)
    job.wait()
    assert reported.read_text().split() == [job.job_id, "5,6", "SIGTERM"]
    assert int(job.job_id) != os.getsid(0)
