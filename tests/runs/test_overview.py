"""``status`` without an argument: the runs below the run root, on machines with and without Slurm."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from unittest import mock

import pytest

from hpc_train.cli import run
from hpc_train.run import lease
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.freeze import freeze
from hpc_train.runs import lookup
from tests.launch.jobs import make_job

GONE = 2**22 + 1  # no process has this id: it is above the kernel's limit


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run root with a finished sweep of two and a younger run that a killed process left, and no Slurm."""
    monkeypatch.setenv("HPC_TRAIN_ROOT", str(tmp_path / "root"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for age, name, number in ((200, "sweep", 10), (100, "sweep", 9), (0, "group/mine", 0)):
        job = make_job(tmp_path / "root" / name, number)
        freeze(job.config, job.run)
        lease.add_submission(job.run, "this machine", first_attempt=0, pid=GONE)
        job.run.claim_attempt()
        if name == "sweep":
            EventLog.open(job.run, "agent-n0", 0).write("finished", exit_code=0)
        os.utime(job.run.path / "run.json", (time.time() - age,) * 2)
    return tmp_path / "root"


def listed(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[list[tuple[str, str, str]], str]:
    assert run(["status", "--json", *options]) == 0
    printed = capsys.readouterr()
    rows = [json.loads(line) for line in printed.out.splitlines()]
    return [(row["run"].partition("/root/")[2], row["strategy"], row["state"]) for row in rows], printed.err


MINE = ("group/mine/0", "dp", "failed")
SWEEP = [("sweep/9", "dp", "done"), ("sweep/10", "dp", "done")]


def test_the_runs_below_the_root_are_listed_without_slurm(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A config of another program and frozen code are not runs; no config is converted to the types of the schema."""
    for other in ("2026-01-01/.hydra", "sweep/code/hash"):
        (root / other / "attempts").mkdir(parents=True)
        (root / other / "config.yaml").write_text("lr: 1")
    (root / "loop").symlink_to("loop")
    with mock.patch.object(lookup, "load", side_effect=AssertionError("it takes 10 times as long")):
        assert listed(capsys) == ([*SWEEP, MINE], "")
        rows, notes = listed(capsys, "--newest", "1")
    assert (rows, notes) == ([MINE], "note: 2 older runs are not listed; --newest N lists more\n")
    assert run(["status"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in table] == ["strategy", "dp", "dp", "dp"]


def test_a_damaged_run_does_not_hide_the_others(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("run.json", "run.copy.json"):
        (root / "sweep" / "9" / name).write_text("{oops")
    rows, notes = listed(capsys)
    assert sorted(rows) == sorted([SWEEP[1], MINE])
    assert "sweep/9" in notes


def test_nothing_to_list_says_where_runs_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HPC_TRAIN_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    assert run(["status"]) == 0
    assert f"no run below {tmp_path}/" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "state"), [("echo '7|SUSPENDED|N/A|(null)|None'", "suspended"), ("exit 1", "starting")]
)
def test_the_state_of_a_job_is_that_of_slurm(
    root: Path, answer: str, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A controller that does not respond is asked once, and its jobs count as present."""
    squeue = root.parent / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text(f'#!/bin/sh\necho "$*" >> {root.parent}/asked\n{answer}\n')
    squeue.chmod(0o755)
    lease.add_submission(RunDirectory(root / "group/mine/0"), "Slurm", first_attempt=0, job_id="7")
    rows, notes = listed(capsys)
    assert rows == [*SWEEP, ("group/mine/0", "dp", state)]
    assert ("Slurm does not respond" in notes) is (state == "starting")
    asked = (root.parent / "asked").read_text().splitlines()
    assert len(asked) == (1 if state == "starting" else 2)
