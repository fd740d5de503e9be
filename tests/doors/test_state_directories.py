"""The scripts that start services in a directory below /tmp refuse one that another user may have prepared."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.doors.command import REPOSITORY, environment
from tests.other_user import OTHER, needs_root

MONITORING = REPOSITORY / "deploy" / "monitoring" / "monitoring.py"
DEVCLUSTER = REPOSITORY / "slurm" / "devcluster" / "devcluster.py"


def call(script: Path, command: str, state: Path, umask: int = 0o022) -> subprocess.CompletedProcess[str]:
    """Runs a script that finds no program to start except a Prometheus that ends at once."""
    programs = state.parent / "programs"
    programs.mkdir(exist_ok=True)
    (programs / "prometheus").write_text("#!/bin/sh\nexit 1\n")
    (programs / "prometheus").chmod(0o755)
    own = environment(PATH=str(programs), HOME=str(state.parent / "home"))
    call = [sys.executable, str(script), command, f"--state={state}", "--port=26980"]
    return subprocess.run(call, env=own, capture_output=True, text=True, timeout=120, check=False, umask=umask)


def prepare(directory: Path, file: Path) -> None:
    """Makes what an attacker makes, so that the scripts find a state and write to ``file``."""
    (directory / "etc").mkdir(parents=True)
    (directory / "etc" / "slurm.conf").touch()
    (directory / "etc" / "settings.json").symlink_to(file)
    (directory / "prometheus.yml").symlink_to(file)


def owned_by_another(state: Path) -> None:
    os.chown(state, OTHER, OTHER)


def writable_by_all(state: Path) -> None:
    state.chmod(0o777)


def writable_by_the_group(state: Path) -> None:
    state.chmod(0o775)


def symbolic_link(state: Path) -> None:
    state.symlink_to(state.rename(state.with_name("elsewhere")))


UNSAFE: dict[Callable[[Path], None], str] = {
    owned_by_another: f"belongs to the user with id {OTHER}",
    writable_by_all: "can be written by other users",
    writable_by_the_group: "can be written by other users",
    symbolic_link: "is a symbolic link",
}
CALLS = [  # every command, and every change under both scripts
    pytest.param(MONITORING, "up", owned_by_another, marks=needs_root),
    (MONITORING, "down", writable_by_all),
    (MONITORING, "up", writable_by_the_group),
    (MONITORING, "down", symbolic_link),
    pytest.param(DEVCLUSTER, "down", owned_by_another, marks=needs_root),
    (DEVCLUSTER, "env", writable_by_all),
    (DEVCLUSTER, "down", writable_by_the_group),
    (DEVCLUSTER, "up", symbolic_link),
]


@pytest.mark.parametrize(
    ("script", "command", "change"), CALLS, ids=lambda value: getattr(value, "stem", getattr(value, "__name__", value))
)
def test_a_state_directory_that_another_user_may_have_prepared_is_refused(
    script: Path, command: str, change: Callable[[Path], None], tmp_path: Path
) -> None:
    state, file = tmp_path / "state", tmp_path / ".bashrc"
    file.write_text("{}")
    prepare(state, file)
    change(state)
    done = call(script, command, state)
    wrong = f"{state} is not safe to use, because it {UNSAFE[change]}; remove it, or name another one with --state"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{script.stem}: {wrong}\n")
    assert file.read_text() == "{}"
    assert (state / "etc" / "slurm.conf").exists()


def test_a_file_is_no_state_directory(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    for script in (MONITORING, DEVCLUSTER):
        done = call(script, "down", tmp_path / "state")
        assert done.returncode == 2 and "because it is not a directory; remove it" in done.stderr


def test_no_other_user_may_enter_a_new_state_directory_of_the_monitoring(tmp_path: Path) -> None:
    done = call(MONITORING, "up", tmp_path / "state", umask=0)
    assert "prometheus did not start" in done.stderr
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
