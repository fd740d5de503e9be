"""``--json``: each command prints what docs/json.md says, mistakes included; the exit code holds in a pipe, too.

Whatever else a test runs with ``--json`` is compared with the page as well (``tests/doors/command.py``, ``called``).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from hpc_train import cli
from hpc_train.commands import COMMANDS
from hpc_train.errors import UserError, UserErrors
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from tests.doors.command import environment, hpc_train
from tests.doors.recorded import recorded_run
from tests.doors.schema import mismatch, tables

Called = Callable[..., subprocess.CompletedProcess[str]]

OF_A_RUN = (
    "status base",
    "top base",
    "logs base",
    "why base",
    "compare base",
    "report base",
    "support base --list",
    "wait base",
    "resume base",
    "cancel base",
    "checkpoint list base",
)
OTHERS = ("script +strategy=dp cluster=slurm", "doctor --topo topo", "help", "--version")
MISTAKES = ("status nope", "logs base --rank x", "why", "nope", "bench nope", "cluster=local optim.lr=-1")


def test_every_command_is_on_the_page() -> None:
    names = {name for name, command in COMMANDS.items() if not command.actions}
    names |= {f"{name} {action}" for name, command in COMMANDS.items() for action in command.actions}
    assert names <= set(tables())


def test_commands_print_what_the_page_says(called: Called, tmp_path: Path) -> None:
    recorded_run(tmp_path / "outputs" / "base")
    (tmp_path / "topo").write_text("\tGPU0\tGPU1\nGPU0\t X \tPHB\nGPU1\tPHB\t X \n")
    for call in OF_A_RUN + OTHERS:
        done = called(*call.split(), "--json")  # it compares
        assert done.returncode == 0, done
        assert done.stdout, done
    none_failed = called("retry", "--failed", "base", "--json")
    assert (none_failed.returncode, none_failed.stdout) == (0, "")


def test_a_mistake_is_the_last_object(called: Called, tmp_path: Path) -> None:
    RunDirectory(tmp_path / "outputs" / "base").create()
    for call in MISTAKES:
        done = called(*call.split(), "--json")
        assert done.returncode == 2, done
        (error,) = json.loads(done.stdout)["errors"]
        assert error["what"] in done.stderr, done
        assert error["fix"] in done.stderr, done
    mistakes = [UserError("first", where="a"), UserError("second", fix="b")]
    with mock.patch.object(cli, "function_of", side_effect=UserErrors(mistakes)):
        several = called("status", "--json")
    found = [{"what": "first", "where": "a", "fix": ""}, {"what": "second", "where": "", "fix": "b"}]
    assert json.loads(several.stdout) == {"errors": found}
    assert called("status", "nope").stdout == ""


SWEEP = ("+strategy=dp", "cluster=local", "cluster.cpu_workers=2", "data=synthetic", "run.name=sweep", "-m", "--json")


def test_refused_jobs_of_a_sweep_are_numbered(called: Called) -> None:
    refused = called(*SWEEP, "optim.lr=1e-3,-1,-2,-3,-4,-5,-6")
    assert refused.returncode == 2, refused.stderr
    errors = json.loads(refused.stdout)["errors"]
    assert [error["jobs"] for error in errors] == [[1], [2], [3], [4], [5], [6]]
    assert {error["where"] for error in errors} == {"optim.lr"}


@pytest.mark.parametrize("second", ["3e-4", "-1"])
def test_a_dry_run_describes_its_jobs(second: str, tmp_path: Path) -> None:
    done = hpc_train(*SWEEP, f"optim.lr=1e-3,{second}", "launch.dry_run=true", cwd=tmp_path)
    found = json.loads(done.stdout)
    first = found["jobs"][0]
    assert (first["job"], first["strategy"], first["workers"]) == (0, "dp", 2)
    assert first["run"].endswith("outputs/sweep/0") and "optim.lr=0.001" in first["overrides"]
    assert first["plan"] in done.stderr and f"verdict: {found['verdict']}\n" in done.stderr
    assert [error["jobs"] for error in found["errors"]] == ([[1]] if done.returncode else [])
    assert (done.returncode, found["verdict"]) == ((2, "refused") if second == "-1" else (0, "can be submitted"))


def test_a_row_that_differs_from_its_table_is_noticed() -> None:
    table = {"a": "int", "b?": "[str]", "c": "{float}?"}
    assert mismatch({"a": 1, "b": ["x"], "c": {"y": 2}}, table) == ""
    assert mismatch({"a": 1, "c": None}, table) == ""
    for row in ({"c": None}, {"a": True, "c": None}, {"a": 1, "b": [1], "c": None}, {"a": 1, "c": None, "d": 1}, [1]):
        assert mismatch(row, table), row


PRINTING = """
import sys
from hpc_train import cli
cli.function_of = lambda name: lambda words: {}
sys.exit(cli.run(["status"]))
"""


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("print('a') or 1", 1),  # the result is known when the reader has exited
        ("[print('a' * 100) for _ in range(100000)] and 0", Exit.NO_READER),
    ],
)
def test_the_exit_code_in_a_pipe_without_a_reader(command: str, code: int) -> None:
    call = [sys.executable, "-c", PRINTING.format(command)]
    with subprocess.Popen(
        call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment() | {"PYTHONUNBUFFERED": ""}, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == code
