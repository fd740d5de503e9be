"""Where runs lie by default, and whom they belong to."""

from __future__ import annotations

import grp
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_train.config.run_path import SCRATCH
from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import freeze
from tests.config.composing import config_of


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "outputs"),
        ({"SCRATCH": "/scratch/me"}, "/scratch/me/hpc_train"),
        ({"CINECA_SCRATCH": "/scratch/me"}, "/scratch/me/hpc_train"),
        ({"SCRATCH": "/scratch/me", "HPC_TRAIN_ROOT": "/runs"}, "/runs"),
    ],
)
def test_the_default_root(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str) -> None:
    for name in (*SCRATCH, "HPC_TRAIN_ROOT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert config_of().run.root == str(Path(expected).absolute())
    assert config_of("run.root=/mine").run.root == "/mine"


@pytest.fixture
def private_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def a_group() -> str:
    """One that is not this process's first, where there is one."""
    ids = [group.gr_gid for group in grp.getgrall()] if os.geteuid() == 0 else os.getgroups()
    return grp.getgrgid(next((group for group in ids if group != os.getegid()), os.getegid())).gr_name


def test_a_group_shares_a_run(tmp_path: Path, private_umask: None) -> None:
    group = a_group()
    run = RunDirectory(tmp_path / "outputs" / "team" / "run")
    freeze(config_of(f"run.root={tmp_path}/outputs", "run.name=team/run", f"run.group={group}"), run)
    (run.logs / "written-later").touch()
    for path in [run.path.parent, run.path, *run.path.rglob("*")]:
        status = path.stat()
        assert grp.getgrgid(status.st_gid).gr_name == group, path
        assert status.st_mode & 0o060 == 0o060, path
        assert not status.st_mode & 0o007, path
        assert path.is_file() or status.st_mode & stat.S_ISGID
    assert (tmp_path / "outputs").stat().st_gid == tmp_path.stat().st_gid


def test_without_a_group_the_umask_is_kept(tmp_path: Path, private_umask: None) -> None:
    run = RunDirectory(tmp_path / "outputs" / "run")
    freeze(config_of(f"run.root={tmp_path}/outputs", "run.name=run"), run)
    assert not [path for path in run.path.rglob("*") if path.stat().st_mode & 0o077]


def test_an_unknown_group_is_refused(tmp_path: Path) -> None:
    config = config_of(f"run.root={tmp_path}/outputs", "run.name=run", "run.group=no-such-group")
    with pytest.raises(UserError, match="no-such-group is not a group on this machine"):
        freeze(config, RunDirectory(tmp_path / "outputs" / "run"))
    assert not (tmp_path / "outputs").exists()
