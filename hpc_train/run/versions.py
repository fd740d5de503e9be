"""Tells which code a run was frozen from: the commit of the user's project, and the versions of the packages."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hpc_train.run.code import FrozenCode
from hpc_train.version import __version__

PACKAGES = ("hpc_train", "torch", "hydra-core", "omegaconf", "submitit", "numpy", "wandb")


def project_version(code: FrozenCode | None, directory: Path) -> dict[str, Any]:
    """Returns the git commit of the user's project, whether its tracked files differ from it, and its work tree.

    The project is the work tree that ``code`` was copied from, or without a copy the one that holds ``directory``. All
    three are None outside of git.
    """
    if code is not None:
        return {"commit": code.commit, "dirty": code.diff is not None, "work_tree": code.work_tree}
    return _version_of_tree(directory)


@cache
def _version_of_tree(directory: Path) -> dict[str, Any]:
    """Cached per process, since a sweep freezes a thousand runs."""
    work_tree = _git(directory, "rev-parse", "--show-toplevel")
    if not work_tree:
        return {"commit": None, "dirty": None, "work_tree": None}
    status = _git(directory, "status", "--porcelain", "--untracked-files=no")
    return {
        "commit": _git(directory, "rev-parse", "--verify", "HEAD"),
        "dirty": None if status is None else bool(status),
        "work_tree": work_tree,
    }


@cache
def environment_versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages from their metadata, without importing them.

    If hpc_train runs from a git checkout, its version ends with the commit, as in ``0.1.0+35e5daae``.
    """
    found = {"python": platform.python_version(), "system": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / ".git").exists():
        commit = _version_of_tree(checkout)["commit"]
        found["hpc_train"] = f"{__version__}+{commit[:8]}" if commit else __version__
    return found


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
