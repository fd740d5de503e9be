"""Whose run a directory is: to continue a run means to execute what its directory says.

The frozen code, the lines of ``cluster.setup`` and the interpreter of a run come from files that their owner may have
changed at any time. A run of another user is therefore continued only if its owner shares it (``run.group``) with a
group of this user, or if this user says ``--trust-owner``. Files of root are trusted.
"""

from __future__ import annotations

import os
import pwd
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.run.code import frozen_code
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import group_id, is_present
from hpc_train.run.record import COPY, RECORD

TRUST = "--trust-owner"


def refuse_foreign(run: RunDirectory, config: Config) -> None:
    """Raises UserError if the directory, the config, the record or the frozen code of ``run`` is another user's."""
    own = {os.geteuid(), 0}
    foreign = [path for path in _deciding(run) if path.stat().st_uid not in own]
    if not foreign:
        return
    own |= _shown_as(run)
    shared = _own_group(config)
    for path in foreign:
        status = path.stat()
        if status.st_uid not in own and status.st_gid != shared:
            raise UserError(
                f"{path} belongs to {_name(status.st_uid)}, and to continue this run executes code of its directory",
                where=str(run.path),
                fix=f"add {TRUST} if you trust its owner, as in `python -m hpc_train resume {TRUST} RUN` or `python -m "
                f"hpc_train agent {TRUST} RUN`; a run that its owner shares with run.group=GROUP needs no option",
            )


def warn_if_open(run: RunDirectory, config: Config) -> None:
    """Prints one line if everybody may replace files of ``run``: in its directory, or by renaming it in ``run.root``.

    Directories that hpc_train creates are not open, but it may find one that is there already.
    """
    root = Path(config.run.root).expanduser().absolute()
    folders = [root, *(parent for parent in run.path.parents if parent.is_relative_to(root)), run.path]
    opened = [path for path in dict.fromkeys([*folders, run.checkpoints, run.code]) if _is_open(path)]
    if opened:
        foreign = [path for path in opened if path.stat().st_uid != os.geteuid()]
        fix = f"run `chmod o-w {' '.join(map(str, opened))}`"
        if foreign and os.geteuid() != 0:
            fix = f"ask {_name(foreign[0].stat().st_uid)} to do so: {fix}"
        shown = ", ".join(map(str, opened))
        print(
            f"warning: every user of this system can replace the config, code and checkpoints of this run, because "
            f"{shown} {'is' if len(opened) == 1 else 'are'} writable by all: {fix}, or set another run.root",
            file=sys.stderr,
        )


def _is_open(path: Path) -> bool:
    """Returns whether every user can remove and replace the entries of the directory; as in /tmp the sticky bit
    prevents that.
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX


def _deciding(run: RunDirectory) -> Iterator[Path]:
    """Yields the files and directories that decide which code runs."""
    code = frozen_code(run)
    paths = [] if code is None else [code.snapshot, *code.paths]
    found = [run.path, run.config, run.path / RECORD, run.path / COPY, *map(Path, paths)]
    return (path for path in dict.fromkeys(found) if is_present(path))


def _shown_as(run: RunDirectory) -> set[int]:
    """Returns the user id that new files get in the directory; another one where a file server maps all users to it."""
    try:
        with tempfile.TemporaryFile(dir=run.path) as file:
            return {os.fstat(file.fileno()).st_uid}
    except OSError:
        return set()


def _own_group(config: Config) -> int | None:
    """Returns the id of ``run.group`` if this user is a member of it; None otherwise."""
    if config.run.group is None:
        return None
    try:
        found = group_id(config.run.group)
    except UserError:
        return None
    return found if found in {os.getegid(), *os.getgroups()} else None


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"the user with id {user}"
