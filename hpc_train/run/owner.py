"""Whose run a directory is: to continue a run means to execute what its directory says.

The frozen code, the lines of ``cluster.setup`` and the interpreter of a run come from files that their owner may have
changed at any time. A run of another user is therefore continued only if its owner shares it (``run.group``) with a
group of this user, or if this user says ``--trust-owner``. Files of root are trusted.
"""

from __future__ import annotations

import os
import pwd
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
