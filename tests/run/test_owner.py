"""A run of another user is continued only if that user shares it, or if this user trusts its owner."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path

import pytest

from hpc_train import cli
from hpc_train.commands import agent
from hpc_train.errors import UserError
from hpc_train.launch import resubmission
from hpc_train.launch.script import Script, one_run, render
from hpc_train.run.code import FrozenCode
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import freeze, load
from hpc_train.run.owner import refuse_foreign, warn_if_open
from tests.config.composing import config_of
from tests.launch.jobs import make_job
from tests.other_user import OTHER, as_other, common, needs_root

__all__ = ["common"]
pytestmark = needs_root


@pytest.fixture
def run(common: Path) -> RunDirectory:
    """A run of this user, with a copy of the code."""
    run = RunDirectory(common / "one")
    code = run.code / "0123"
    code.mkdir(parents=True)
    freeze(
        config_of(f"run.root={common}", "run.name=one"), run, code=FrozenCode("/", str(code), (str(code),), None, None)
    )
    for path in run.path.rglob("*"):
        path.chmod(0o777 if path.is_dir() else 0o666)
    run.path.chmod(0o777)
    return run


def directory(run: RunDirectory) -> list[Path]:
    return [run.path]


def config(run: RunDirectory) -> list[Path]:
    return [run.config]


def record(run: RunDirectory) -> list[Path]:
    return [run.path / "run.json"]


def snapshot(run: RunDirectory) -> list[Path]:
    return [run.code / "0123"]


def everything(run: RunDirectory) -> list[Path]:
    return [run.path, *run.path.rglob("*")]


@pytest.mark.parametrize("what", [directory, config, record, snapshot, everything])
def test_a_run_of_another_user_is_refused(
    run: RunDirectory,
    what: Callable[[RunDirectory], list[Path]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    done = []
    monkeypatch.setattr(agent, "reexec_from_snapshot", lambda run: None)
    monkeypatch.setattr(agent, "run_agent", lambda run, begun: done.append("agent") or 0)
    monkeypatch.setattr(resubmission, "refuse_live", lambda run: done.append("submitted") or sys.exit(0))
    refuse_foreign(run, load(run))
    for path in what(run):
        os.chown(path, OTHER, OTHER)
    commands = [["resume", str(run.path)], ["agent", str(run.path)], [str(run.path)]]
    for command in commands:
        assert cli.run(command) == 2
        said = capsys.readouterr().err
        assert "belongs to" in said and "--trust-owner" in said and str(what(run)[0]) in said
    assert done == []
    assert cli.run(["agent", "--trust-owner", str(run.path)]) == 0
    with pytest.raises(SystemExit):
        cli.run(["resume", "--trust-owner", str(run.path)])
    assert done == ["agent", "submitted"]


def test_a_group_that_shares_the_run_is_trusted_and_no_other(run: RunDirectory, common: Path) -> None:
    shutil.rmtree(run.path)
    freeze(config_of(f"run.root={common}", "run.name=one", "run.group=root"), run)
    for path in everything(run):
        os.chown(path, OTHER, 0)
    refuse_foreign(run, load(run))
    os.chown(run.config, OTHER, OTHER)
    with pytest.raises(UserError, match=r"config\.yaml belongs to"):
        refuse_foreign(run, load(run))


def test_files_of_root_are_trusted(run: RunDirectory) -> None:
    as_other(lambda: refuse_foreign(run, load(run)))


def test_a_file_server_that_shows_one_owner_for_all_is_no_reason(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in everything(run):
        os.chown(path, OTHER, OTHER)
    monkeypatch.setattr("hpc_train.run.owner._shown_as", lambda run: {OTHER})
    refuse_foreign(run, load(run))


def test_the_agents_of_a_submitted_job_know(tmp_path: Path) -> None:
    job = make_job(tmp_path / "sweep")
    assert job.agent_options == ()
    text = render(Script("t", job.config.cluster, one_run(tmp_path), {}, agent_options=("--trust-owner",)))
    assert '-m hpc_train agent --trust-owner "$RUN" &' in text


def test_directories_that_everybody_can_write_are_told_in_one_line(
    common: Path, run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """``common`` has the sticky bit, so nobody can replace what is in it; the run itself is open."""
    config = load(run)
    warn_if_open(run, config)
    (line,) = capsys.readouterr().err.splitlines()
    opened = f"{run.path}, {run.checkpoints}, {run.code}"
    assert line.startswith("warning: every user") and f"because {opened} are writable by all" in line
    assert f"run `chmod o-w {opened.replace(',', '')}`" in line
    for path in (run.path, run.checkpoints, run.code):
        path.chmod(0o755)
    warn_if_open(run, config)
    assert capsys.readouterr().err == ""
    common.chmod(0o777)
    warn_if_open(run, config)
    assert f"because {common} is writable by all" in capsys.readouterr().err


def test_the_owner_of_an_open_root_is_asked(common: Path, run: RunDirectory) -> None:
    common.chmod(0o777)
    os.chown(common, 4242, -1)
    for path in (run.path, run.checkpoints, run.code):
        path.chmod(0o755)
    config = load(run)

    def tell() -> None:
        with redirect_stderr(io.StringIO()) as said:
            warn_if_open(run, config)
        assert "ask the user with id 4242 to do so" in said.getvalue(), said.getvalue()

    as_other(tell)
