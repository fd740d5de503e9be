"""The path of a run directory: ``root/NAME`` with ``run.name``, else a new directory under the root."""

from __future__ import annotations

import os
import re
import secrets
from datetime import datetime
from pathlib import Path

from hpc_train.errors import UserError

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=,@-]*(/[A-Za-z0-9_][A-Za-z0-9_.+=,@-]*)*")


SCRATCH = ("SCRATCH", "PSCRATCH", "SCRATCHDIR", "MYSCRATCH", "CINECA_SCRATCH")  # the names that sites use


def default_root() -> str:
    """The default of ``run.root``. It prefers scratch space, because checkpoints would fill a home directory."""
    root = os.environ.get("HPC_TRAIN_ROOT")
    scratch = next((os.environ[name] for name in SCRATCH if os.environ.get(name)), None)
    return root or (f"{scratch}/hpc_train" if scratch else "outputs")


def run_directory(root: str, name: str | None = None, fork: str | None = None) -> str:
    """The directory of a run, or the parent of a sweep's runs, as an absolute path. Creates nothing.

    A name is stable across calls; without one the directory is new: the time, and four random digits because two sweeps
    can start in one second.

    Raises:
        UserError: the name leads out of ``root``, the place is taken by a file, or it cannot be written.
    """
    base = Path(root).expanduser().absolute()
    if fork is not None and name is None:
        raise UserError("run.fork is set, but run.name, the run to start from, is not", where="run.fork",
                          fix="run.name=OLD run.fork=NEW")  # fmt: skip
    chosen, key = (fork, "run.fork") if fork is not None else (name, "run.name")
    if chosen is None:
        path = base / f"{datetime.now():%Y-%m-%d_%H-%M-%S}-{secrets.token_hex(2)}"
    else:
        path = base / _checked(str(chosen), key)
    _check_writable(path)
    return str(path)


def job_directory(sweep_directory: Path, index: int, count: int) -> Path:
    """The run directory of job ``index`` of ``count`` submitted together: a single job uses the directory itself."""
    return sweep_directory if count == 1 else sweep_directory / str(index)


def fork_source(root: str, name: str, fork: str, path: Path) -> Path:
    """The run that ``path``, a run under the fork's name, starts from: the one at the same place under ``name``."""
    base = Path(root)
    return base / name / path.relative_to(base / fork)


def _checked(name: str, key: str) -> str:
    if not NAME.fullmatch(name):
        raise UserError(
            f"the run name {name!r} cannot be a directory under run.root",
            where=key,
            fix=f"{key}=letters, digits and _-.+=,@ (and / between two names, no leading . or /)",
        )
    return name


def _check_writable(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise UserError(
            f"{path} is a file, not a run directory", where="run.name", fix="another run.name, or move the file away"
        )
    present = next(parent for parent in (path, *path.parents) if parent.exists())
    if not present.is_dir():
        raise UserError(f"{present} is not a directory", where="run.root", fix="run.root=DIR that can be written")
    if not os.access(present, os.W_OK | os.X_OK):
        raise UserError(f"{present} cannot be written", where="run.root", fix="run.root=DIR that can be written")
