"""Completion in bash: what is offered for the last word of a line, and that a shell takes it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpc_train.cli import run
from hpc_train.commands.completion import complete
from tests.doors.command import environment


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HPC_TRAIN_ROOT", str(tmp_path))
    monkeypatch.setenv("COMP_LINE", "")
    for name in ("mine", "lr/0", "lr/1"):
        (tmp_path / name / "attempts").mkdir(parents=True)
        (tmp_path / name / "config.yaml").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("s", ["script", "stacks", "status", "sync"]),
        ("help lo", ["logs"]),
        ("logs ", ["lr", "mine"]),
        ("why lr/", ["lr/0", "lr/1"]),
        ("logs mine --le", ["--level"]),
        ("checkpoint e", ["export"]),
        ("checkpoint export m", ["mine"]),
        ("checkpoint export mine --fo", ["--format"]),
        ("bench sc", ["scaling"]),
        ("--shell", ["--shell-completion"]),
        ("+strategy=dp optim=mu", ["optim=muon"]),
        ("freeze +strategy=hyb", ["+strategy=hybrid", "+strategy=hybrid3d", "+strategy=hybrid4"]),
        ("evaluate mine optim.lr_s", ["optim.lr_scaling="]),
    ],
)
def test_the_last_word_is_completed(line: str, offered: list[str]) -> None:
    assert complete(f"hpc-train {line}") == offered


def test_bash_takes_the_words(root: Path) -> None:
    """A word that is the only one is followed by a space."""
    (root / "hpc-train").write_text(f'#!/bin/sh\nexec {sys.executable} -m hpc_train "$@"\n')
    (root / "hpc-train").chmod(0o755)
    script = """
        eval "$(hpc-train --shell-completion install=bash)"
        compopt() { echo "$@"; }
        COMP_LINE='hpc-train logs mi' COMP_POINT=17 COMP_WORDS=(hpc-train logs mi)
        _hpc_train
        echo "${COMPREPLY[@]}"
    """
    variables = environment(HPC_TRAIN_ROOT=str(root))
    variables["PATH"] = f"{root}:{variables['PATH']}"
    done = subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["+o nospace", "mine"], done.stderr


def test_a_query_without_a_line_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("COMP_LINE")
    assert run(["-sc", "query=bash"]) == 2
    assert "COMP_LINE is not set" in capsys.readouterr().err
