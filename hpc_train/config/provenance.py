"""Which code and which package versions a run was started with."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("hpc_train", "torch", "hydra-core", "omegaconf", "submitit", "numpy", "wandb")


@cache
def code_version() -> dict[str, Any]:
    """Git commit of the checkout that this package runs from, and whether tracked files differ from it.

    Asked once per process, since a sweep freezes a thousand runs. Both are None for an installed wheel and where git is
    absent.
    """
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return {"commit": None, "dirty": None}
    commit = _git(folder, "rev-parse", "HEAD")
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if status is None else bool(status)}


@cache
def environment_versions() -> dict[str, str]:
    """Python's and the packages' versions, from their metadata: imports nothing."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
