"""Commands for one run that get a sweep or a finished run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_train.cli import run
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import freeze
from tests.config.composing import config_of


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
