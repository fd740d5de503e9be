"""Reads which users the caller trusts, from ``~/.config/hpc_train/user.yaml``.

    trust:
      owners: [alice, 5001]
      groups: [vision]

A user is trusted by name or id, or as a member of a group. ``$XDG_CONFIG_HOME`` replaces ``~/.config``.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hpc_train.errors import UserError

LARGEST = 64 * 1024  # bytes
EXAMPLE = "trust: {owners: [alice], groups: [vision]}"


@dataclass(frozen=True)
class Trust:
    """The ids of trusted users and groups."""

    owners: frozenset[int] = frozenset()
    groups: frozenset[int] = frozenset()

    def covers(self, user: int) -> bool:
        """Returns whether the user with this id is trusted."""
        return user in self.owners or (bool(self.groups) and not self.groups.isdisjoint(_groups_of(user)))


def user_file() -> Path | None:
    """Returns the path of the caller's own settings; None if the caller has no home directory."""
    directory = os.environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(directory):  # noqa: PTH117 - an empty one is relative; XDG ignores relative ones
        try:
            directory = str(Path.home() / ".config")
        except RuntimeError:
            return None
    return Path(directory, "hpc_train", "user.yaml")


def read_trust() -> Trust:
    """Returns whom the caller trusts; nobody without the file.

    Raises:
        UserError: the file is another user's, can be written by others, or has another form.
    """
    path = user_file()
    try:
        text = None if path is None else _own_text(path)
    except (FileNotFoundError, NotADirectoryError):
        return Trust()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", where=str(path), fix="chmod u+r") from error
    if path is None or text is None:
        return Trust()
    try:
        content = yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise _wrong(path, f"is not YAML: {' '.join(str(error).split())}") from error
    content = {} if content is None else content
    if not isinstance(content, dict) or content.keys() - {"trust"}:
        raise _wrong(path, "may only have the key trust")
    trust = {} if content.get("trust") is None else content["trust"]
    if not isinstance(trust, dict) or trust.keys() - {"owners", "groups"}:
        raise _wrong(path, "may only have the keys owners and groups below trust")
    owners = _ids(path, "owners", trust.get("owners"), lambda name: pwd.getpwnam(name).pw_uid)
    groups = _ids(path, "groups", trust.get("groups"), lambda name: grp.getgrnam(name).gr_gid)
    return Trust(owners, groups)


def _own_text(path: Path) -> str:
    """Returns the content of a regular file that only the caller can write.

    Raises:
        OSError: it cannot be read.
        UserError: it is another user's, or others can write it.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path} is not a regular file", where=str(path), fix="replace it by a file")
        if status.st_uid != os.geteuid():
            what = f"{path}, which says whom you trust, belongs to another user"
            raise UserError(what, where=str(path), fix="replace it by a file that you own")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            what = f"{path}, which says whom you trust, can be written by other users"
            raise UserError(what, where=str(path), fix=f"chmod go-w {path}")
        return file.read(LARGEST).decode(errors="replace")


def _ids(path: Path, key: str, values: Any, id_of: Callable[[str], int]) -> frozenset[int]:
    """Returns the ids of a list of names and ids."""
    listed = [] if values is None else values
    if not isinstance(listed, list) or not all(type(value) in (int, str) for value in listed):
        raise _wrong(path, f"needs a list of names or ids as trust.{key}")
    found = set()
    for value in listed:
        try:
            found.add(value if isinstance(value, int) else id_of(value))
        except KeyError:
            raise _wrong(path, f"names {value!r} in trust.{key}, which this machine does not know") from None
    return frozenset(found)


def _groups_of(user: int) -> set[int]:
    try:
        account = pwd.getpwuid(user)
    except KeyError:
        return set()
    return set(os.getgrouplist(account.pw_name, account.pw_gid))


def _wrong(path: Path, what: str) -> UserError:
    return UserError(f"{path} {what}", where=str(path), fix=f"correct the file, as in: {EXAMPLE}")
