"""Gathers the wheels that ``gpu_checks`` needs on a machine without network that has only torch and numpy.

    python -m gpu_checks.wheels .whl

The wheels are for CPython 3.12 on manylinux x86_64. Copy them there together with the source tree, and run in it:

    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target $TMPDIR/site .whl/*.whl \
      && PYTHONPATH=$TMPDIR/site python3 -m gpu_checks --budget 560 --out $OUT

The packages are the required dependencies of ``pyproject.toml`` and some of its extras, and what these require, without
torch, numpy, the packages that torch brings, and wandb, which ``gpu_checks`` does not need.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PYTHON = "3.12"
GLIBC = (28, 27, 17, 12)  # minor versions of manylinux_2_N: pip accepts no other version than those that it is given
TARGET = {"python_version": PYTHON, "python_full_version": f"{PYTHON}.3", "implementation_name": "cpython"}
TARGET |= {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}
TARGET |= {"platform_python_implementation": "CPython"}
EXTRAS = ("fp8",)  # torchao
WITH_TORCH = frozenset(("torch", "numpy", "typing-extensions", "filelock", "sympy", "mpmath", "networkx", "jinja2"))
WITH_TORCH |= frozenset(("markupsafe", "fsspec", "setuptools", "triton"))
UNNEEDED = frozenset(["wandb"])
MOST_BYTES = 64 << 20


class WheelError(Exception):
    """A wheel cannot be had, or the wheels do not fit together."""


@dataclass(frozen=True)
class Wheel:
    """A wheel file, with the name and version in its metadata and its requirements on the target."""

    path: Path
    name: str
    version: str
    requires: tuple[Requirement, ...]

    @classmethod
    def read(cls, path: Path) -> Wheel:
        with zipfile.ZipFile(path) as archive:
            name = next(each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
            metadata = Parser().parsestr(archive.read(name).decode())
        requires = filter(_applies, map(Requirement, metadata.get_all("Requires-Dist", [])))
        return cls(path, canonicalize_name(metadata["Name"]), metadata["Version"], tuple(requires))


def main() -> None:
    parser = argparse.ArgumentParser(description="Gathers the wheels that gpu_checks needs on a GPU machine.")
    parser.add_argument("folder", type=Path, help="where to put the wheels")
    folder = parser.parse_args().folder
    try:
        wheels = gather(required(ROOT / "pyproject.toml"), folder)
        check(wheels)
    except WheelError as error:
        sys.exit(str(error))
    for wheel in sorted(wheels, key=lambda wheel: -wheel.path.stat().st_size):
        print(f"{wheel.path.stat().st_size / 2**20:8.2f} MiB  {wheel.path.name}")
    print(f"{size(wheels) / 2**20:8.2f} MiB in all")


def required(pyproject: Path) -> list[Requirement]:
    """Returns the required dependencies and those of ``EXTRAS`` that exist."""
    project = tomllib.loads(pyproject.read_text())["project"]
    extras = project.get("optional-dependencies", {})
    return [Requirement(text) for text in (*project["dependencies"], *(e for x in EXTRAS for e in extras.get(x, ())))]


def gather(requirements: Iterable[Requirement], folder: Path) -> list[Wheel]:
    """Downloads or builds one wheel for each requirement and for what it requires, in turn.

    Raises:
        WheelError: a package has no wheel for the target and cannot be built as a pure Python wheel.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Wheel] = {}
    waiting = [requirement for requirement in requirements if _is_carried(requirement)]
    while waiting:
        requirement = waiting.pop(0)
        if canonicalize_name(requirement.name) not in found:
            wheel = _fetch(requirement, folder)
            found[wheel.name] = wheel
            waiting += filter(_is_carried, wheel.requires)
    return [*found.values()]


def check(wheels: Iterable[Wheel]) -> None:
    """Raises WheelError if a wheel does not meet what another requires, or if all together are too large."""
    by_name = {wheel.name: wheel for wheel in wheels}
    for wheel in by_name.values():
        for requirement in filter(_is_carried, wheel.requires):
            version = by_name[canonicalize_name(requirement.name)].version
            if not requirement.specifier.contains(version, prereleases=True):
                raise WheelError(f"{wheel.path.name} requires {requirement}, but version {version} was gathered")
    if size(by_name.values()) > MOST_BYTES:
        raise WheelError(f"the wheels have {size(by_name.values()):,} bytes, more than {MOST_BYTES:,}")


def size(wheels: Iterable[Wheel]) -> int:
    return sum(wheel.path.stat().st_size for wheel in wheels)


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate(TARGET | {"extra": ""})


def _is_carried(requirement: Requirement) -> bool:
    return canonicalize_name(requirement.name) not in WITH_TORCH | UNNEEDED


def _fetch(requirement: Requirement, folder: Path) -> Wheel:
    """Downloads a wheel for the target, or builds one where the package index has only a source archive."""
    before = set(folder.glob("*.whl"))
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC]
    platforms += [f"--platform=manylinux{name}_x86_64" for name in ("2014", "2010", "1")]
    target = ["--only-binary=:all:", f"--python-version={PYTHON}", "--implementation=cp", *platforms]
    refused = _pip(("download", *target, "-d"), requirement, folder)
    if refused and (failed := _pip(("wheel", "-w"), requirement, folder)):
        raise WheelError(f"{requirement}: no wheel for the target, and none can be built\n{refused}\n{failed}")
    wheel = _newest(requirement, folder, before)
    if refused and not wheel.path.name.endswith("-none-any.whl"):
        raise WheelError(f"{wheel.path.name} was built for this machine, not for the target")
    return wheel


def _newest(requirement: Requirement, folder: Path, before: set[Path]) -> Wheel:
    """Returns the wheel that pip has added, or an earlier one that it has accepted."""
    added = [*set(folder.glob("*.whl")) - before] or [*before]
    wheels = [wheel for wheel in map(Wheel.read, added) if wheel.name == canonicalize_name(requirement.name)]
    if len(wheels) != 1:
        raise WheelError(f"{folder} holds {len(wheels)} wheels of {requirement.name}; empty it and run this again")
    return wheels[0]


def _pip(how: tuple[str, ...], requirement: Requirement, folder: Path) -> str:
    """Runs pip for one package without its dependencies; returns the error message, empty on success."""
    command = [sys.executable, "-m", "pip", *how[:1], "-q", "--no-deps", "-c", str(ROOT / "constraints.txt")]
    wanted = f"{requirement.name}{requirement.specifier}"
    done = subprocess.run([*command, *how[1:], str(folder), wanted], capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


if __name__ == "__main__":
    main()
