"""A wheel works from any directory with its conf/, an editable install with the repository's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "hpc_train", "hydra_plugins", "conf")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is built, so that building leaves nothing in the repository."""
    folder = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def install(folder: Path, *what: str) -> Path:
    """A virtual environment with ``what`` in it, and this interpreter's packages behind that."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    packages = [path for path in sys.path if path.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(packages) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--disable-pip-version-check"]
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*pip, "install", *options, *what], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "bin" / "python"


def call(python: Path, place: Path, *arguments: str) -> str:
    place.mkdir(exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [python, *arguments], cwd=place, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


WHERE = ["-c", "from hpc_train.config.conf_files import config_directory as d; print(d())"]


@pytest.mark.long_form(15)  # the list of packages is compared below
def test_a_wheel_brings_its_config(sources: Path, tmp_path: Path) -> None:
    python = install(tmp_path / "venv", str(sources))
    conf = Path(call(python, tmp_path / "place", *WHERE).strip())
    assert conf.parent.name == "hpc_train" and tmp_path in conf.parents
    expected = {path.relative_to(REPOSITORY / "conf") for path in (REPOSITORY / "conf").rglob("*.yaml")}
    assert {path.relative_to(conf) for path in conf.rglob("*.yaml")} == expected
    planned = call(python, tmp_path / "place", "-m", "hpc_train", "+strategy=hybrid", "launch.dry_run=true", "-m")
    assert "can be submitted" in planned
    script = tmp_path / "venv" / "bin" / "hpc-train"
    frozen = call(script, tmp_path / "place", "freeze", "strategy=dp", "run.name=x")
    assert (Path(frozen.strip()) / "config.yaml").exists()
    call(script, tmp_path / "place", "init", "shapes")
    arguments = ["-cd", "conf", "experiment=baseline", "launch.dry_run=true", "-m"]
    assert "can be submitted" in call(script, tmp_path / "place" / "shapes", *arguments)


@pytest.mark.long_form(10)
def test_an_editable_install_reads_the_repositorys_config(sources: Path, tmp_path: Path) -> None:
    python = install(tmp_path / "venv", "--editable", str(sources))
    assert Path(call(python, tmp_path / "place", *WHERE).strip()) == sources / "conf"
    (sources / "conf" / "optim" / "mine.yaml").write_text("defaults: [adamw, _self_]\nlr: 0.125\n")
    shown = call(python, tmp_path / "place", "-m", "hpc_train", "optim=mine", "--cfg", "job", "--package", "optim")
    assert "lr: 0.125" in shown
    planned = call(python, tmp_path / "place", "-m", "hpc_train", "+strategy=dp,pp", "launch.dry_run=true", "-m")
    assert "\njob 1 to this machine" in planned and planned.count("can be submitted") == 1


def test_the_list_of_packages_is_complete() -> None:
    listed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        ".".join(path.parent.relative_to(REPOSITORY).parts)
        for top in ("hpc_train", "hydra_plugins")
        for path in (REPOSITORY / top).rglob("*.py")
    }
    assert set(listed) == found | {"hpc_train.conf"}
    assert len(listed) == len(set(listed))


def test_a_wandb_that_loses_attempts_of_an_offline_run_does_not_fit() -> None:
    listed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
    wandb = next(found for found in map(Requirement, listed) if found.name == "wandb")
    assert "0.28.2" not in wandb.specifier
    assert "0.29.0" in wandb.specifier
