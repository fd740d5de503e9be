"""What a release has left on disk opens with the present code: its runs, its checkpoints, its site file."""

from __future__ import annotations

import json
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_train.version import __version__
from tests.doors.command import environment, hpc_train
from tests.releases.record import HERE, OVERRIDES

VERSIONS = sorted(path.name.removesuffix(".tar.gz") for path in HERE.glob("*.tar.gz"))
CONTINUED = [override for override in OVERRIDES if not override.startswith("train.steps=")]

Called = Callable[..., subprocess.CompletedProcess[str]]


def opened(version: str, folder: Path) -> None:
    """Extracts what ``version`` has left, with its run in ``outputs``, where commands look for runs."""
    with tarfile.open(HERE / f"{version}.tar.gz") as file:
        file.extractall(folder, filter="data")
    (folder / "outputs").mkdir()
    (folder / "run").rename(folder / "outputs" / "run")


def test_each_release_is_recorded() -> None:
    assert {"0.1.0", __version__} <= set(VERSIONS)
    assert sum(path.stat().st_size for path in HERE.glob("*.tar.gz")) < 100_000 * len(VERSIONS)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_run_of_a_release_is_shown(version: str, tmp_path: Path, called: Called) -> None:
    opened(version, tmp_path)
    for words, expected in (
        (["status", "run"], "4/4"),
        (["why", "run"], "nothing failed"),
        (["logs", "run"], "step 4/4"),
        (["compare", "run"], "done"),
        (["checkpoint", "list", "run"], "intact"),
        (["checkpoint", "verify", "run"], "intact"),
        (["report", "run", "--out", "page.html"], "page.html"),
        (["checkpoint", "export", "run", "--to", "model.pt"], "step 4"),
    ):
        done = called(*words)
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout, words
    assert "validation" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("version", VERSIONS)
def test_the_run_of_a_release_continues_with_the_same_settings(version: str, tmp_path: Path, called: Called) -> None:
    opened(version, tmp_path)
    done = called("freeze", *CONTINUED, "train.steps=5", "run.name=run")
    assert done.returncode == 0, done.stderr
    (written,) = (tmp_path / "outputs" / "run" / "events").glob("submitter-*")
    message = json.loads(written.read_text())["message"]
    assert message.startswith("continues with changed settings: train.steps: 4 -> 5; run.root: ")
    assert message.count(";") == 1


@pytest.mark.long_form(30)  # above the run is frozen again, and its checkpoint read
@pytest.mark.parametrize("version", VERSIONS)
def test_the_run_of_a_release_trains_on(version: str, tmp_path: Path) -> None:
    opened(version, tmp_path)
    done = hpc_train(*CONTINUED, "train.steps=5", "run.name=run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "continues from step 4" in done.stdout or "step 5/5" in done.stdout
    shown = hpc_train("evaluate", "run", "--json", cwd=tmp_path, env=environment())
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert json.loads(shown.stdout)["step"] == 5


@pytest.mark.parametrize("version", VERSIONS)
def test_the_site_file_of_a_release_is_read(version: str, tmp_path: Path, called: Called) -> None:
    opened(version, tmp_path)
    done = called("-cd", "site", "cluster=here", "--cfg", "job", "-p", "cluster")
    assert done.returncode == 0, done.stderr
    assert "account: project_123" in done.stdout and "per_gpu_hour: 1.9" in done.stdout
