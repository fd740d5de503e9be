"""What runs on a GPU machine needs only torch, numpy and the carried wheels, and the wheels fit together."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gpu_checks.check import read
from gpu_checks.checks import ALL, PLANS, checks_for
from gpu_checks.wheels import MOST_BYTES, ROOT, TARGET, UNNEEDED, WITH_TORCH, Wheel, WheelError, check, required
from tests.checkpoint.progress import IN_LONG_FORM

# importable names of what wheels.py gathers, of what torch brings, and of the source tree
CARRIED = "hydra omegaconf antlr4 yaml submitit cloudpickle psutil xxhash rich pygments markdown_it mdurl packaging"
BROUGHT = "torch torchgen functorch numpy typing_extensions filelock sympy mpmath networkx jinja2 markupsafe fsspec"
OPTIONAL = "torchao triton setuptools pkg_resources"
OPTIONAL += " autocommand backports importlib_metadata jaraco more_itertools platformdirs zipp"  # parts of setuptools
OWN = "hpc_train hydra_plugins gpu_checks benchmarks tests conf sitecustomize usercustomize"
_FIND = f"""
import sys
from importlib.machinery import PathFinder
class FindCarried(PathFinder):
    allowed = frozenset({f"{CARRIED} {BROUGHT} {OPTIONAL} {OWN}".split()!r}) | sys.stdlib_module_names
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        top = name.partition(".")[0]
        if path is None and top not in cls.allowed and not top.startswith("_"):
            return None
        return super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = FindCarried
"""
QUICK = ("facts", "overflow", "one_shard")  # the quick checks that start no run


@pytest.fixture
def carried(tmp_path: Path) -> dict[str, str]:
    """Returns an environment in which Python imports only what is carried, in all processes."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_FIND)
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "CUDA_VISIBLE_DEVICES": ""}


def test_what_is_not_carried_cannot_be_imported(carried: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import wandb"], env=carried, capture_output=True, text=True, check=False
    )
    assert "No module named 'wandb'" in done.stderr


@pytest.mark.long_form(30, every_share=True)  # test_runner.py has the runner, and every check can be found
def test_the_checks_are_imported_and_run_on_a_cpu_with_what_is_carried(carried: dict[str, str], tmp_path: Path) -> None:
    modules = {check.entry.partition(":")[0] for check in ALL} | {"gpu_checks.__main__"}
    command = [sys.executable, "-c", f"import {', '.join(sorted(modules))}"]
    done = subprocess.run(command, env=carried, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert verdicts(carried, tmp_path, "--only", *QUICK) == dict.fromkeys(QUICK, "passed")
    assert "| **facts** | passed |" in (tmp_path / "table.md").read_text()


@IN_LONG_FORM  # the case before
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("options", [(), ("--plan", "one-gpu"), ("--plan", "node", "--cpu-ranks", "2")], ids=" ".join)
def test_all_checks_pass_on_a_cpu_or_need_a_gpu(
    options: tuple[str, ...], carried: dict[str, str], tmp_path: Path
) -> None:
    checks = PLANS[options[1]] if options else checks_for(0)
    ranks = 2 if "node" in options else 0
    passing = {check.name for check in checks if check.gpus == 0 or 1 < check.gpus <= ranks}
    wanted = {check.name: "passed" if check.name in passing else "not run" for check in checks}
    assert verdicts(carried, tmp_path, *options) == wanted


def verdicts(environment: dict[str, str], out: Path, *options: str) -> dict[str, str]:
    command = [sys.executable, "-m", "gpu_checks", "--out", str(out), "--budget", "1400", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {line["check"]: line["verdict"] for line in read(out) if line["kind"] == "verdict"}


def wheel(folder: Path, name: str, version: str, *requires: str, size: int = 0) -> Wheel:
    path = folder / f"{name}-{version}-py3-none-any.whl"
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {each}" for each in requires)]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(lines))
        archive.writestr("filler", b"\0" * size)
    return Wheel.read(path)


def test_wheels_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    one = wheel(tmp_path, "one", "1.0", "two>=2", "torch", "three; python_version < '3.12'", "four; extra == 'x'")
    assert [each.name for each in one.requires] == ["two", "torch"]
    check([one, wheel(tmp_path, "two", "2.1")])
    with pytest.raises(WheelError, match=r"requires two>=2, but version 1\.9"):
        check([one, wheel(tmp_path, "two", "1.9")])
    with pytest.raises(WheelError, match="more than"):
        check([wheel(tmp_path, "large", "1", size=MOST_BYTES)])


def test_what_the_package_requires_is_carried_or_there() -> None:
    names = {requirement.name.lower() for requirement in required(ROOT / "pyproject.toml")}
    assert {"hydra-core", "omegaconf", "submitit", "psutil", "xxhash", "rich"} <= names
    assert {"torch", "numpy"} <= WITH_TORCH
    assert {"wandb"} == UNNEEDED
    assert TARGET["python_version"] == "3.12"
