"""The state directory, which has a name that others can guess, below /tmp. It holds the key and the pid files."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from daemons import Refused


def make_state(state: Path) -> None:
    """Makes the directory, unless this user has one.

    Raises:
        Refused: another user may have written files there.
    """
    state.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        state.mkdir(mode=0o755)  # munged refuses a socket that some users cannot reach
    refuse_unsafe(state)


def refuse_unsafe(state: Path) -> None:
    """Raises Refused if another user may have written files in the directory."""
    try:
        status = state.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISLNK(status.st_mode):
        wrong = "is a symbolic link"
    elif not stat.S_ISDIR(status.st_mode):
        wrong = "is not a directory"
    elif status.st_uid != os.getuid():
        wrong = f"belongs to the user with id {status.st_uid}"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        wrong = "can be written by other users"
    else:
        return
    raise Refused(f"{state} is not safe to use, because it {wrong}; remove it, or name another one with --state")
