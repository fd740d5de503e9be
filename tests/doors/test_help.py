"""The help: of the tool, which lists the commands first, and of each command."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

from hpc_train.cli import run
from hpc_train.commands import COMMANDS
from hpc_train.version import __version__

SUBCOMMANDS = {name: COMMANDS[name].actions for name in ("checkpoint", "bench")}
WITHOUT_JSON = ("train", "agent")  # `status RUN --json` gives the result of a training


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    try:
        assert run(arguments) == 0
    except SystemExit as end:
        assert end.code == 0, arguments
    return capsys.readouterr().out


@pytest.mark.parametrize("arguments", [("help",), ("--help",), ("-h",), ("train", "--help"), ("strategy=dp", "--help")])
def test_the_help_lists_the_commands_first_and_then_the_groups(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(capsys, *arguments).splitlines()
    places = [next(i for i, line in enumerate(lines) if line.startswith(f"  {name} ")) for name in COMMANDS]
    assert places == sorted(places)
    assert places[-1] < next(i for i, line in enumerate(lines) if "strategy: auto, cp, dp, hsdp, hybrid" in line)


def test_own_groups_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "strategy").mkdir()
    (tmp_path / "strategy" / "mine.yaml").touch()
    found = json.loads(printed(capsys, "--help", "-cd", str(tmp_path), "--json"))
    assert {"dp", "mine"} <= set(found["groups"]["strategy"])
    assert "hybrid" in found["groups"]["strategy"] and "schema/model" not in found["groups"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_json(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for calls in [[name, *sub] for sub in ([part] for part in SUBCOMMANDS.get(name, ()))] or [[name]]:
        shown = printed(capsys, *calls, "--help")
        assert shown.startswith(("usage: python -m hpc_train", "python -m hpc_train ["))
        assert name in WITHOUT_JSON or name == "help" or "--json" in shown, calls
        assert "``" not in shown
        for words in (["help", *calls], ["--help", *calls], ["help", *calls, "--json"]):
            assert printed(capsys, *words) == printed(capsys, *words[1:], "--help"), words


def test_the_version_is_that_of_hpc_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "--version").startswith(f"hpc_train {__version__} (torch ")


def test_the_version_is_printed_also_without_torch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        if package == "torch":
            raise importlib.metadata.PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert run(["--version"]) == 0
    assert "torch not installed, hydra-core 1.0" in capsys.readouterr().out


def test_the_directory_and_the_script_of_a_run_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    frozen = json.loads(printed(capsys, "freeze", "+strategy=dp", "run.name=x", "--json"))
    assert frozen == {"run": str(tmp_path / "outputs" / "x")}
    assert json.loads(printed(capsys, "cancel", "x", "--json")) == {"cancelled": 0, "ended_before": 1}
    script = json.loads(printed(capsys, "script", "+strategy=dp", "cluster=slurm", "--json"))["script"]
    assert script.startswith("#!") and "#SBATCH" in script
