"""Completion: what is offered for the last word of a line, and that bash, zsh and fish take it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_train.cli import run
from hpc_train.commands.completion import SHELLS, complete
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
        ("s", ["script", "stacks", "status", "support", "sync"]),
        ("help lo", ["logs"]),
        ("logs ", ["lr", "mine"]),
        ("why lr/", ["lr/0", "lr/1"]),
        ("top m", ["mine"]),
        ("compare l", ["lr"]),
        ("sync m", ["mine"]),
        ("logs mine --le", ["--level"]),
        ("checkpoint e", ["export"]),
        ("checkpoint p", ["promote"]),
        ("checkpoint export m", ["mine"]),
        ("checkpoint export mine --fo", ["--format"]),
        ("bench sc", ["scaling"]),
        ("--shell", ["--shell-completion"]),
        ("+strategy=dp optim=mu", ["optim=muon"]),
        ("freeze +strategy=hyb", ["+strategy=hybrid", "+strategy=hybrid3d", "+strategy=hybrid4"]),
        ("plan optim.lr_s", ["optim.lr_scaling="]),
        ("evaluate mine optim.lr_s", ["optim.lr_scaling="]),
    ],
)
def test_the_last_word_is_completed(line: str, offered: list[str]) -> None:
    assert complete(f"hpc-train {line}") == offered


@pytest.mark.parametrize("name", ["m$(touch${IFS}x)", "m;x", "m`x`", "m x", "m\nx", "m*", "m\x1b[2J"])
def test_a_name_that_a_shell_would_execute_is_not_offered(root: Path, name: str) -> None:
    (root / "mine").rename(root / name)
    assert complete("hpc-train logs m") == []


def test_an_unfinished_first_word_is_no_override() -> None:
    assert complete("hpc-train") == []


IN_SHELLS = {  # complete `hpc-train logs mi`; a word that is the only one is followed by a space
    "bash": ("""
        eval "$(hpc-train --shell-completion install=bash)"
        compopt() { echo "$@"; }
        COMP_LINE='hpc-train logs mi' COMP_POINT=17 COMP_WORDS=(hpc-train logs mi)
        _hpc_train
        echo "${COMPREPLY[@]}"
    """, ["+o nospace", "mine"]),
    "zsh": ("""
        compdef() { }
        compadd() { echo "$@" }
        eval "$(hpc-train --shell-completion install=zsh)"
        words=(hpc-train logs mi) CURRENT=3 PREFIX=mi
        _hpc_train
    """, ["-- mine", "-S  --"]),
    "fish": ("hpc-train --shell-completion install=fish | source; complete -C 'hpc-train logs mi'", ["mine"]),
}  # fmt: skip


@pytest.mark.parametrize("shell", IN_SHELLS)
def test_a_shell_takes_the_words(shell: str, root: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    script, expected = IN_SHELLS[shell]
    (root / "hpc-train").write_text(f'#!/bin/sh\nexec {sys.executable} -m hpc_train "$@"\n')
    (root / "hpc-train").chmod(0o755)
    variables = environment(HPC_TRAIN_ROOT=str(root))
    variables["PATH"] = f"{root}:{variables['PATH']}"
    done = subprocess.run([shell, "-c", script], env=variables, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == expected, done.stderr


@pytest.mark.parametrize("shell", SHELLS)
def test_a_query_without_a_line_is_refused(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COMP_LINE")
    assert run(["-sc", f"query={shell}"]) == 2
    assert "COMP_LINE is not set" in capsys.readouterr().err
