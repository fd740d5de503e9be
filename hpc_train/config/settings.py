"""Reads the settings of the site and of the user, which are weaker than the files of a project and the command line.

The order, weakest first: the defaults of the schema; the file of the site, ``$HPC_TRAIN_SITE`` or
``/etc/hpc_train/site.yaml``; the file of the user, ``~/.config/hpc_train/user.yaml`` (``$XDG_CONFIG_HOME`` replaces
``~/.config``); the files of config groups that a job uses; the command line. Each part of the two files is optional:

    defaults:                       # the files of config groups that a job uses if it does not choose others
      - cluster: slurm
    cluster:                        # values of config keys
      account: project_1
    trust:                          # the users whose code and weights are used; see run/owner.py
      owners: [alice]
    limits:                         # only in the file of a site: limits that no job may exceed
      cluster.nodes: {max: 16}
      cluster.partition: {one_of: [gpu, debug]}

A frozen run is not affected. This module imports neither Hydra nor OmegaConf.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from hpc_train.config.removed import apply_new_names, tell_new_name
from hpc_train.config.schema import Config
from hpc_train.errors import UserError, nearest

SITE = "HPC_TRAIN_SITE"  # "" uses no file of a site
SYSTEM_FILE = Path("/etc/hpc_train/site.yaml")
ROOT = "HPC_TRAIN_ROOT"
LARGEST = 64 * 1024  # bytes
OF_JOBS = ("model", "data", "strategy", "metrics", "hooks", "eval_sets")  # a site knows nothing about these groups
GROUPS = tuple(field.name for field in fields(Config) if field.name not in OF_JOBS)
CHOICES = ("cluster", "cluster/fabric", "optim", "precision")  # groups of conf/config.yaml with several files
RULES: Mapping[str, type | tuple[type, ...]] = {"max": (int, float), "one_of": list}
TIMES = ("cluster.time", "cluster.time_min")  # keys whose limit is a time such as "24:00:00"


@dataclass(frozen=True, eq=False)
class Settings:
    """Holds the content of one file. An unchanged file is the same object.

    Attributes:
        choices: the option of each config group that ``defaults`` chooses.
        values: nested values of config keys, without the groups that the file does not set.
        limits: the rule of each key, such as ``{"max": 16}``.
    """

    path: Path
    choices: Mapping[str, str]
    values: Mapping[str, Any]
    limits: Mapping[str, Mapping[str, Any]]
    trust: Any


def read_settings() -> tuple[Settings, ...]:
    """Returns the settings of the site and of the user, the weaker first; without those that do not exist.

    Raises UserError if a file cannot be used: see ``site_settings`` and ``user_settings``.
    """
    return tuple(settings for settings in (site_settings(), user_settings()) if settings is not None)


def site_settings() -> Settings | None:
    """Returns the settings of the site; None if it has none.

    Raises UserError if ``$HPC_TRAIN_SITE`` names no file, the file belongs to neither root nor the caller, others may
    write it, or its content is wrong.
    """
    named = os.environ.get(SITE)
    if named == "":
        return None
    path = Path(named) if named else SYSTEM_FILE
    settings = _read(path, frozenset({0, os.geteuid()}), "root or to you")
    if settings is None and named:
        raise UserError(f"{path} does not exist", where=SITE, fix=f"export {SITE}=FILE of your site, or unset {SITE}")
    return settings


def user_settings() -> Settings | None:
    """Returns the caller's own settings; None if there are none.

    Raises UserError if the file belongs to another user, others may write it, or its content is wrong.
    """
    path = user_file()
    settings = None if path is None else _read(path, frozenset({os.geteuid()}), "you")
    if settings is not None and settings.limits:
        raise _mistake(settings.path, "sets limits, which only the file of a site may set")
    return settings


def user_file() -> Path | None:
    """Returns the path of the caller's own settings; None if the caller has no home directory."""
    directory = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(directory):  # noqa: PTH117 - an empty one is relative; XDG ignores relative ones
        try:
            directory = str(Path.home() / ".config")
        except RuntimeError:
            return None
    return Path(directory, "hpc_train", "user.yaml")


def site_limits() -> list[Settings]:
    """Returns the settings whose limits apply: the file of ``$HPC_TRAIN_SITE`` does not replace the file of root."""
    files = [site_settings(), _read(SYSTEM_FILE, frozenset({0}), "root")]
    return [settings for settings in dict.fromkeys(files) if settings is not None and settings.limits]


def root_of_settings() -> tuple[str, Path] | None:
    """Returns ``run.root`` of the settings, which may have interpolations, and the file that sets it; else None."""
    for settings in reversed(read_settings()):
        root = settings.values.get("run", {}).get("root")
        if root is not None:
            return str(root), settings.path
    return None


def _read(path: Path, owners: frozenset[int], whose: str) -> Settings | None:
    """Returns the content of ``path``; None if it does not exist, or lies in a directory that the caller cannot enter.
    ``owners`` are the ids of the users to whom the file may belong. ``whose`` names them."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if isinstance(error, PermissionError) and not os.access(path.parent, os.X_OK):
            return None
        raise UserError(f"{path} cannot be read: {error.strerror}", where=str(path), fix=f"chmod a+r {path}") from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path} is not a regular file", where=str(path), fix="replace it by a file")
        if status.st_uid not in owners:
            what = f"{path} belongs to another user, whose settings are not used: it must belong to {whose}"
            variable = "XDG_CONFIG_HOME=DIR" if path == user_file() else f"{SITE}=FILE"
            fix = f"chown it, or export {variable} for other settings"
            raise UserError(what, where=str(path), fix=fix)
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            what = f"{path} can be written by other users, so its settings are not used"
            raise UserError(what, where=str(path), fix=f"chmod go-w {path}")
        text = file.read(LARGEST).decode(errors="replace")
    return _parsed(path, text)


@lru_cache(maxsize=8)
def _parsed(path: Path, text: str) -> Settings:
    try:
        content = yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise _mistake(path, f"is not YAML: {' '.join(str(error).split())}") from error
    content = {} if content is None else content
    known = ("defaults", *GROUPS, "trust", "limits")
    if not isinstance(content, dict):
        raise _mistake(path, f"must be a table with the keys {', '.join(known)}")
    for key, value in content.items():
        if key in OF_JOBS:
            fix = f"put {key} into a file of a config group, or on the command line"
            raise UserError(f"{path} sets {key}, which depends on the job", where=f"{key} in {path}", fix=fix)
        if key not in known:
            raise UserError(f"{path} has the unknown key {key}", where=f"{key} in {path}", fix=nearest(key, known))
        if key in GROUPS and not isinstance(value, dict | None):
            raise _mistake(path, f"must have a table of keys below {key}")
    for earlier in apply_new_names(content):
        tell_new_name(earlier, str(path))
    root = (content.get("run") or {}).get("root")
    if isinstance(root, str) and "${hpc_train.root" in root:  # an interpolation that only conf/cluster/ needs
        what = f"{path} uses hpc_train.root, but ${ROOT} takes precedence over run.root of this file anyway"
        raise UserError(what, where=f"run.root in {path}", fix="run.root: a directory, such as /scratch/${oc.env:USER}")
    return Settings(
        path=path,
        choices=_choices(path, content.get("defaults") or []),
        values={key: value for key, value in content.items() if key in GROUPS and value},
        limits=_limits(path, content.get("limits") or {}),
        trust=content.get("trust"),
    )


def _choices(path: Path, defaults: Any) -> dict[str, str]:
    choices = {}
    for entry in defaults if isinstance(defaults, list) else [defaults]:
        pairs = list(entry.items()) if isinstance(entry, dict) else []
        if len(pairs) != 1 or not isinstance(pairs[0][1], str):
            raise _mistake(path, "must have a list of `GROUP: NAME` as defaults, such as `- cluster: slurm`")
        group, name = pairs[0]
        if group not in CHOICES:
            what = f"{path} chooses a file of {group} under defaults"
            raise UserError(what, where=f"defaults in {path}", fix=nearest(group, CHOICES))
        choices[group] = name
    return choices


def _limits(path: Path, limits: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(limits, dict):
        raise _mistake(path, "must have a table `KEY: {max: VALUE}` or `KEY: {one_of: [VALUE, ...]}` as limits")
    for key, rule in limits.items():
        if default_of(str(key)) is ABSENT:
            raise _mistake(path, f"limits {key}, which is not a config key")
        ((name, value),) = rule.items() if isinstance(rule, dict) and len(rule) == 1 else [("", None)]
        kind = str if key in TIMES and name == "max" else RULES.get(name, ())
        if not isinstance(value, kind):
            example = '{max: "24:00:00"}, in quotes' if key in TIMES else "{max: NUMBER} or {one_of: [VALUE, ...]}"
            raise _mistake(path, f"must limit {key} as in {key}: {example}")
    return limits


ABSENT = object()


def default_of(key: str) -> Any:
    """Returns the default of ``key`` in the schema, which may be null or a group of keys; ``ABSENT`` without one."""
    node: Any = Config()
    for name in key.split("."):
        node = getattr(node, name, ABSENT)
    return node


def _mistake(path: Path, what: str) -> UserError:
    return UserError(f"{path} {what}", where=str(path), fix="correct the file as docs/howto/site.md describes")
