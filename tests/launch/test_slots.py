"""GPUs and cores are never held twice, and come back however their holder ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hpc_train.launch.executors.local import Share, reserve, take

NAMES = ["gpu-0", "gpu-1", "gpu-2"]


def never() -> bool:
    return False


def at_once(folder: Path, count: int) -> list[str]:
    """What can be had without waiting."""
    asked = iter([False, False, False, True])
    with take(folder, NAMES, count, lambda: next(asked, True)) as held:
        return held


def test_two_holders_never_share(tmp_path: Path) -> None:
    with take(tmp_path, NAMES, 2, never) as first:
        assert first == ["gpu-0", "gpu-1"]
        assert at_once(tmp_path, 1) == ["gpu-2"]
        assert at_once(tmp_path, 2) == []
        assert at_once(tmp_path, 1) == ["gpu-2"], "a wait in vain holds nothing afterwards"
    assert at_once(tmp_path, 3) == NAMES


def test_waiting_ends_when_it_is_over(tmp_path: Path) -> None:
    with take(tmp_path, NAMES, 3, never):
        started = time.monotonic()
        with take(tmp_path, NAMES, 1, lambda: time.monotonic() - started > 0.5) as held:
            assert held == []


def test_a_killed_holder_gives_back(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from hpc_train.launch.executors.local import take\n"
        f"with take(Path({str(tmp_path)!r}), {NAMES!r}, 3, lambda: False):\n"
        "    print('held', flush=True); time.sleep(60)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    with holder, holder.stdout:
        assert holder.stdout.readline() == "held\n"
        assert at_once(tmp_path, 1) == []
        holder.kill()
    assert at_once(tmp_path, 3) == NAMES


def test_a_job_sees_only_the_cores_that_it_holds(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    script = (
        "import os; from hpc_train.launch.executors.local import Share, reserve\n"
        f"with reserve(Share(0, 1, {str(tmp_path)!r}, 1), lambda: False):\n"
        "    print(len(os.sched_getaffinity(0)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
    assert os.sched_getaffinity(0) == before


def test_a_job_sees_only_the_gpus_that_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_train.launch.executors.local.visible_devices", lambda: ("0", "1", "GPU-abc"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,GPU-abc")
    (tmp_path / ".slots").mkdir()
    with take(tmp_path / ".slots", ["gpu-0"], 1, never), reserve(Share(2, 0, str(tmp_path), 1), never):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,GPU-abc"


def test_a_sweep_keeps_to_its_cap(tmp_path: Path) -> None:
    share = Share(gpus=0, cores=1, sweep=str(tmp_path), at_once=1)
    before = os.sched_getaffinity(0)
    try:
        asked = iter([False, False, True, True])
        with reserve(share, never), take(tmp_path / ".slots", ["slot-0"], 1, asked.__next__) as turn:
            assert turn == []
    finally:
        os.sched_setaffinity(0, before)


def test_two_sweeps_do_not_wait_for_each_other(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    sweeps = [tmp_path / "first", tmp_path / "second"]
    try:
        for sweep in sweeps:
            sweep.mkdir()
        first, second = (Share(0, len(before), str(sweep), 1) for sweep in sweeps)
        with reserve(first, never), reserve(second, never):
            assert os.sched_getaffinity(0) == before
    finally:
        os.sched_setaffinity(0, before)


def test_a_job_runs_without_locks_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = os.sched_getaffinity(0)
    slots = tmp_path / ".slots"
    slots.mkdir()
    (slots / f"core-{min(before)}").symlink_to("elsewhere")
    with reserve(Share(0, 1, str(tmp_path), 1), never):
        assert os.sched_getaffinity(0) == before
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
