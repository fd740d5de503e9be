"""Jobs on this machine: how many at once, in sessions of their own, with the exit that the scheduler would see."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_train.config.schema import ClusterConfig
from hpc_train.launch.executors.local import LocalJobExecutor, SessionExecutor, jobs_at_once
from hpc_train.run.requests import watch_signals
from tests.launch.jobs import make_job


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


def until(condition: Callable[[], bool], timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_job_has_its_own_session_sees_the_gpus_and_gets_a_signal_that_arrives_before_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    reported = tmp_path / "reported"
    job = SessionExecutor(tmp_path / "submitit", {}).submit(tell_session, str(reported))
    os.kill(int(job.job_id), signal.SIGTERM)
    until(job.done)
    assert reported.read_text().split() == [job.job_id, "5,6", "SIGTERM"]
    assert int(job.job_id) != os.getsid(0)
