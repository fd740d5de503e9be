"""``init --site`` describes clusters of ten shapes, and real ones as they were quoted; each value names its source."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import yaml

from hpc_train.commands import init_site
from hpc_train.config import settings
from hpc_train.config.compose import register
from hpc_train.schedulers.slurm.client import Controller
from hpc_train.schedulers.slurm.records import gpus_of
from tests.doors.recorded_sites import GRES, RECORDED
from tests.doors.sites import SHAPES, Shape

Called = Callable[..., CompletedProcess[str]]


@pytest.fixture(autouse=True)
def this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(init_site.shutil, "which", lambda name, path=None: None)


def text_of(shape: Shape) -> str:
    return init_site.examine(shape.ask, shape.environment).text()


@pytest.mark.parametrize("name", [*SHAPES, *RECORDED])
def test_the_file_describes_the_cluster(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (SHAPES | RECORDED)[name]
    text = text_of(shape)
    content = yaml.safe_load(text)
    assert content.pop("defaults") == [{"cluster": "slurm"}]
    assert content == dict(shape.values)
    joined = re.sub(r"\n *#  +", " ", text)
    for said in shape.says:
        assert said in joined, joined
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if re.match(r" +\w+: \S", line):
            assert lines[number - 1].strip().startswith("#"), line
    assert max(map(len, lines)) <= 120
    path = tmp_path / "site.yaml"
    path.write_text(text)
    path.chmod(0o644)
    monkeypatch.setenv(settings.SITE, str(path))
    register()  # all keys and values are valid


@pytest.mark.parametrize("gres", GRES)
def test_the_gpus_of_a_recorded_gres(gres: str) -> None:
    assert gpus_of(gres) == GRES[gres]


def test_a_second_run_shows_what_has_changed(called: Called, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPES["no accounting"]
    monkeypatch.setattr(init_site, "find_controller", lambda: (Controller.UP, ""))
    monkeypatch.setattr(init_site, "examine", lambda internet: init_site.Survey(shape.answers["config"]))
    first = called("init", "--site", "here.yaml")
    assert first.returncode == 0, first.stderr
    assert f"export HPC_TRAIN_SITE={tmp_path}/here.yaml" in first.stdout
    assert "then try:  python -m hpc_train doctor --submit" in first.stdout
    assert (tmp_path / "here.yaml").stat().st_mode & 0o022 == 0
    assert "is up to date" in called("init", "--site", "here.yaml").stdout
    edited = (tmp_path / "here.yaml").read_text() + "telemetry: {wandb: {mode: online}}\n"
    (tmp_path / "here.yaml").write_text(edited)
    again = called("init", "--site", "here.yaml")
    assert again.returncode == 1 and "-telemetry: {wandb: {mode: online}}\n" in again.stdout
    assert "--overwrite replaces it" in again.stderr
    assert (tmp_path / "here.yaml").read_text() == edited
    assert called("init", "--site", "here.yaml", "--overwrite").returncode == 0
    assert "online" not in (tmp_path / "here.yaml").read_text()


def test_without_slurm_it_says_where_to_run(called: Called, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init_site, "find_controller", lambda: (Controller.ABSENT, "sbatch is not on the PATH"))
    refused = called("init", "--site")
    assert refused.returncode == 2 and "run it on a login node of the cluster" in refused.stderr


def test_what_a_job_found_about_the_internet() -> None:
    offline = init_site.Survey("")
    init_site._add_internet(offline, None, False)
    assert "    mode: offline" in offline.text() and "tested by a job" in offline.text()
