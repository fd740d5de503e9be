"""Determines the path of a run directory: ``root/NAME`` if ``run.name`` is set, else a new directory under the root."""

from __future__ import annotations

import os
import re
import secrets
from datetime import datetime
from pathlib import Path
from typing import Any

from hpc_train.config.settings import read_settings, root_of_settings
from hpc_train.errors import UserError
from hpc_train.users import name_of_user

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=,@-]*(/[A-Za-z0-9_][A-Za-z0-9_.+=,@-]*)*")
LONGEST_NAME = 255  # bytes of a name on Linux file systems
SCRATCH = ("SCRATCH", "PSCRATCH", "SCRATCHDIR", "MYSCRATCH", "CINECA_SCRATCH")  # variables that sites set
UNSET = "unset"


def default_root(scratch: str | None = None, project: str | None = UNSET) -> str:
    """Returns the default of ``run.root``: ``$HPC_TRAIN_ROOT``, or what the settings of the user or of the site set, or
    scratch space, because checkpoints may fill a home directory. Raises UserError if the directory of the project is
    unknown (None).

    Args:
        scratch: the scratch directory that a site's file names; None uses the variables that sites set.
        project: the directory of the user's project below ``scratch``, if the site has one per project.
    """
    root = os.environ.get("HPC_TRAIN_ROOT")
    if root is None and project is None:
        raise UserError(
            f"the directory of your project below {scratch} is unknown",
            where="run.root",
            fix="run.root=DIR, or export HPC_TRAIN_ROOT=DIR; cluster.account=PROJECT if the project names it",
        )
    if root:
        return root
    if scratch is None and (setting := root_of_settings()) is not None:
        return _resolved(*setting)
    if scratch is not None and project not in (None, UNSET):
        scratch = f"{scratch}/{project}"
    scratch = scratch or next((os.environ[name] for name in SCRATCH if os.environ.get(name)), None)
    return f"{scratch}/hpc_train" if scratch else "outputs"


def _resolved(root: str, path: Path) -> str:
    """Returns ``run.root`` of the settings in ``path`` with the values of its interpolations."""
    if "${" not in root:
        return root
    from omegaconf import OmegaConf  # many commands do not need it
    from omegaconf.errors import OmegaConfBaseException

    values: dict[str, Any] = {}
    for settings in read_settings():
        values = {group: values.get(group, {}) | table for group, table in {**values, **settings.values}.items()}
    try:
        return str(OmegaConf.create(values | {"run": {"root": root}}).run.root)
    except OmegaConfBaseException as error:
        what = f"run.root is {root}, which has no value: {error.msg}"
        raise UserError(what, where=f"run.root in {path}", fix="run.root: DIR, or set the variable or key") from error


def run_directory(root: str, name: str | None = None, fork: str | None = None) -> str:
    """Returns the absolute path of a run directory, or of the parent of a sweep's runs. It creates nothing.

    Without a name the path is new: it consists of the time and four random digits, because two sweeps can start in the
    same second. Raises UserError if the name or the root is not valid, the path is a file, or the directory cannot be
    written.
    """
    if not root.isprintable():
        raise UserError(
            f"run.root is {root!r}, which has a line break or another control character",
            where="run.root",
            fix="run.root=DIR with a path of printable characters",
        )
    base = Path(root).expanduser().absolute()
    if fork is not None and name is None:
        raise UserError(
            "run.fork is set, but run.name, which names the run to start from, is not set",
            where="run.fork",
            fix="run.name=OLD run.fork=NEW",
        )
    chosen, key = (fork, "run.fork") if fork is not None else (name, "run.name")
    if chosen is None:
        path = base / f"{datetime.now():%Y-%m-%d_%H-%M-%S}-{secrets.token_hex(2)}"
    else:
        path = base / _checked(str(chosen), key)
    _check_writable(path)
    return str(path)


def directory_to_fork(root: str, name: str) -> Path:
    """Returns the absolute path of the run ``name``, which a fork only reads."""
    return Path(root).expanduser().absolute() / _checked(name, "run.name")


def job_directory(sweep_directory: Path, index: int, count: int) -> Path:
    """Returns the run directory of job ``index`` of ``count`` jobs. A single job uses the directory itself."""
    return sweep_directory if count == 1 else sweep_directory / str(index)


def fork_source(root: str, name: str, fork: str, path: Path) -> Path:
    """Returns the run that the forked run ``path`` starts from, which has the same relative path under ``name``."""
    base = Path(root)
    return base / name / path.relative_to(base / fork)


def relative(path: Path) -> str:
    """Returns ``path`` relative to the working directory if it is below it."""
    shown = os.path.relpath(path)
    return str(path) if shown.startswith("..") else shown


def _checked(name: str, key: str) -> str:
    if not NAME.fullmatch(name):
        raise invalid_name(name, key)
    longest = max(name.split("/"), key=len)
    if len(longest) > LONGEST_NAME:
        raise UserError(
            f"the name {longest[:40]}… has {len(longest)} characters, but a directory name has at most {LONGEST_NAME}",
            where=key,
            fix=f"a shorter {key}",
        )
    return name


def invalid_name(name: str, key: str) -> UserError:
    return UserError(
        f"{name!r} is not a valid run name",
        where=key,
        fix=f"{key}=NAME of letters A-Z, digits and _-.+=,@; / separates two names, and no name starts with . or -",
    )


def _check_writable(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise UserError(
            f"{path} is a file, not a run directory", where="run.name", fix="another run.name, or move the file"
        )
    broken = next((parent for parent in (path, *path.parents) if parent.is_symlink() and not parent.exists()), None)
    if broken is not None:
        raise UserError(
            f"{broken} is a symbolic link to {broken.readlink()}, which does not exist",
            where="run.name" if broken == path else "run.root",
            fix="correct or remove the link, or set another run.name or run.root",
        )
    present = next(parent for parent in (path, *path.parents) if parent.exists())
    if not present.is_dir():
        raise UserError(
            f"{present} is not a directory", where="run.root", fix="run.root=DIR with a directory that you may write"
        )
    if present == path and not os.access(path, os.W_OK | os.X_OK) and (uid := path.stat().st_uid) != os.geteuid():
        raise UserError(
            f"{path} belongs to {name_of_user(uid)}, and you have no permission to write to it",
            where="run.name",
            fix="another run.name, or run.root=DIR with a directory that you own",
        )
    if not os.access(present, os.W_OK | os.X_OK) or present.parts[1:2] in (("proc",), ("sys",)):
        raise UserError(
            f"you have no permission to write to {present}",
            where="run.root",
            fix="run.root=DIR with a directory that you may write",
        )
