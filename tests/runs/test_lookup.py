"""Runs are found by name, by ``status`` below the run root, with and without Slurm, and by commands for one run."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from unittest import mock

import pytest

from hpc_train.cli import run
from hpc_train.errors import UserError
from hpc_train.run import lease
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.freeze import freeze, text_of
from hpc_train.runs import lookup
from hpc_train.runs.lookup import find_runs
from tests.config.composing import config_of
from tests.launch.jobs import make_job


@pytest.mark.parametrize(("variable", "below"), [("HPC_TRAIN_ROOT", ""), ("SCRATCH", "hpc_train")])
def test_a_name_is_looked_up_where_runs_lie(
    variable: str, below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tmp_path / below / "sweep", 3)
    job.run.config.write_text(text_of(job.config))
    monkeypatch.delenv("HPC_TRAIN_ROOT", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    (found,) = find_runs("sweep/3", "status")
    assert (found.run, found.number) == (job.run, 3)
    assert [item.run for item in find_runs("sweep", "status")] == [job.run]
    with pytest.raises(UserError, match="no run or sweep"):
        find_runs("sweep/4", "status")


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


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two runs that have ended after 8 of 8 steps."""
    for number in range(2):
        directory = RunDirectory(tmp_path / "sw" / str(number))
        freeze(config_of("train.steps=8", f"run.root={tmp_path}", "run.name=sw"), directory)
        directory.update_record(total_steps=8, result={"steps": 8})
    return tmp_path / "sw"


@pytest.mark.parametrize("command", ["logs", "resume", "stacks", "checkpoint list"])
def test_a_sweep_is_refused_with_the_command_for_one_run(
    sweep: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command.split(), str(sweep)]) == 2
    assert f"name one run: python -m hpc_train {command} {sweep}/0" in capsys.readouterr().err


def test_a_finished_run_is_not_resumed(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (sweep / "0" / "checkpoints" / "step-00000008").mkdir(parents=True)
    assert run(["resume", str(sweep / "0")]) == 0
    assert "already done: 8 of 8 steps" in capsys.readouterr().out
    assert run(["resume", str(sweep / "0"), "--json"]) == 0
    ended = {"run": str(sweep / "0"), "state": "done", "exit_code": 0}
    assert ended.items() <= json.loads(capsys.readouterr().out).items()


def test_cancelling_counts_in_words(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cancel", str(sweep / "0")]) == 0
    assert "cancelling 0 of 1 job; 1 is not waiting or running" in capsys.readouterr().out
