"""A wheel works from any directory with its conf/, an editable install with the repository's."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hpc_train.commands import COMMANDS
from hpc_train.config import import_path
from hpc_train.config.import_path import install_extra
from hpc_train.version import __version__
from tests.releases.record import OVERRIDES

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
    done = pip_install(folder, "--no-deps", "--no-build-isolation", "--no-index", *what)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "bin" / "python"


def pip_install(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs this interpreter's ``pip install`` on the virtual environment in ``folder``, which needs no pip."""
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "--disable-pip-version-check"]
    options = ["--quiet", "--no-compile", "--retries", "1"]
    return subprocess.run([*pip, "install", *options, *arguments], capture_output=True, text=True, check=False)


def call(python: Path, place: Path, *arguments: str) -> str:
    place.mkdir(exist_ok=True)
    removed = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")  # the first call compiles for the others
    environment = {name: value for name, value in os.environ.items() if name not in removed}
    done = subprocess.run(
        [python, *arguments], cwd=place, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


WHERE = ["-c", "from hpc_train.config.conf_files import config_directory as d; print(d())"]


HELP = """
import contextlib, io
from hpc_train import cli
from hpc_train.commands import COMMANDS
from hpc_train.config import import_path
from hpc_train.config.import_path import install_extra
for name in COMMANDS:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        assert cli.run([name, "--help"]) == 0, name
    assert "hpc_train" in shown.getvalue(), name
print(*COMMANDS)
"""


@pytest.fixture(scope="module")
def wheel(sources: Path) -> Path:
    """A wheel that is built from the sdist."""
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", sources / "dist", sources]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    version = f"hpc_train-{__version__}"
    assert (sources / "dist" / f"{version}.tar.gz").exists()
    return sources / "dist" / f"{version}-py3-none-any.whl"


@pytest.mark.long_form(60)  # the lists of packages and of their files are compared below
def test_the_wheel_that_the_sdist_gives_works_outside_of_the_clone(wheel: Path, tmp_path: Path) -> None:
    python = install(tmp_path / "venv", str(wheel))
    place = tmp_path / "place"
    conf = Path(call(python, place, *WHERE).strip())
    assert conf.parent.name == "hpc_train" and tmp_path in conf.parents
    for folder, installed in (("conf", conf), ("hpc_train", conf.parent)):  # the files of data and templates as well
        files = {path.relative_to(REPOSITORY / folder) for path in (REPOSITORY / folder).rglob("*") if path.is_file()}
        missing = [path for path in files if not (installed / path).exists() and "__pycache__" not in path.parts]
        assert not missing

    program = [python, place, "-m", "hpc_train"]
    assert call(*program, "--version").startswith(f"hpc_train {__version__} (")
    assert call(python, place, "-c", HELP).split() == list(COMMANDS)
    assert "partition: standard-g" in call(*program, "cluster=lumi", "--cfg", "job", "-p", "cluster")
    planned = call(*program, "+strategy=hybrid", "launch.dry_run=true", "-m")
    assert "can be submitted" in planned
    script = tmp_path / "venv" / "bin" / "hpc-train"
    frozen = call(script, place, "freeze", "strategy=dp", "run.name=x")
    assert (Path(frozen.strip()) / "config.yaml").exists()
    call(script, place, "init", "shapes")
    dry_run = ["-cd", "conf", "experiment=baseline", "launch.dry_run=true", "-m"]
    assert "can be submitted" in call(script, place / "shapes", *dry_run)
    assert "done: 4 steps" in call(*program, *OVERRIDES, "run.name=run")
    call(*program, "report", "run", "--out", "page.html")
    assert "validation" in (place / "page.html").read_text()


NOT_TO_SUBMIT = ("torch", "wandb")  # packages that only workers import


def interpreter(version: str) -> Path | None:
    """Returns a Python of ``version``, from the search path or from pyenv."""
    for path in (*Path.home().glob(f".pyenv/versions/{version}.*/bin/python"), shutil.which(f"python{version}")):
        if path is not None and not subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode:
            return Path(path)  # and not what pyenv puts on the search path for each version, which may not run
    return None


NO_INDEX = re.compile(r"connection|timed? ?out|HTTP error|from versions: none", re.IGNORECASE)  # in the words of pip


@pytest.mark.timeout(600)  # pip, on a busy machine
@pytest.mark.long_form(300)  # in no share: make test-pythons; packages come from the index
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_other_pythons_submit_without_torch(version: str, wheel: Path, tmp_path: Path) -> None:
    base = interpreter(version)
    if base is None:
        pytest.skip(f"Python {version} is not installed: neither python{version} nor ~/.pyenv/versions/{version}.*")
    subprocess.run([base, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    listed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
    needed = [text for text in listed if Requirement(text).name not in NOT_TO_SUBMIT]
    done = pip_install(tmp_path / "venv", "--prefer-binary", "-c", REPOSITORY / "constraints.txt", *needed)
    without_index = [line for line in done.stderr.splitlines() if NO_INDEX.search(line)]
    if done.returncode and without_index:
        pytest.skip(f"pip cannot reach its index: {without_index[-1]}")
    assert done.returncode == 0, done.stdout + done.stderr
    done = pip_install(tmp_path / "venv", "--no-deps", "--no-index", wheel)
    assert done.returncode == 0, done.stdout + done.stderr
    place = tmp_path / "place"
    program = [python, place, "-m", "hpc_train"]
    assert call(*program, "--version").startswith(f"hpc_train {__version__} (torch not installed, ")
    assert call(python, place, "-c", HELP).split() == list(COMMANDS)
    assert "can be submitted" in call(*program, "+strategy=hybrid", "launch.dry_run=true", "-m")
    frozen = call(*program, "freeze", "+strategy=dp", "run.name=x")
    assert (Path(frozen.strip()) / "config.yaml").exists()
    assert "x" in call(*program, "status", "x")


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


def test_advice_to_install_an_extra_is_as_hpc_train_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert install_extra("lora") == f"pip install -e '{REPOSITORY}[lora]'"
    monkeypatch.setattr(import_path, "__file__", str(tmp_path / "hpc_train" / "config" / "import_path.py"))
    metadata = tmp_path / "hpc_train-9.dist-info"
    metadata.mkdir()
    extras = ["hpc_train[hf]; extra == 'lora'", 'peft>=0.21; extra == "lora"', 'safetensors>=0.4; extra == "hf"']
    text = "".join(f"Requires-Dist: {line}\n" for line in ["torch>=2.11", *extras])
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: hpc_train\nVersion: 9\n{text}")
    monkeypatch.syspath_prepend(tmp_path)
    assert install_extra("lora") == "pip install 'peft>=0.21' 'safetensors>=0.4'"


def test_no_page_and_no_message_installs_from_an_index() -> None:
    folders = ("docs", "hpc_train", "notebooks", "examples")
    files = [REPOSITORY / "README.md", *(file for name in folders for file in (REPOSITORY / name).rglob("*.*"))]
    texts = {file: file.read_text() for file in files if file.suffix in (".md", ".py", ".ipynb", ".sh", ".yaml")}
    assert not [file for file, text in texts.items() if re.search(r"install\s+(-\S+\s+)*'?hpc[-_]train\b", text)]
