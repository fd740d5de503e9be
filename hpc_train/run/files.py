"""Small files that must be there whole or not at all: JSON by rename, and lines appended in one write.

``run.group``: a run that all members of a Unix group may read, resume and remove.

Directories pass the group on (setgid), and the processes of the run write for the group whatever the umask says;
without ``run.group`` the user's umask is kept.
"""

from __future__ import annotations

import grp
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from hpc_train.errors import UserError

TAIL_BYTES = 8192  # more than a line of metrics
# The hub does nothing else meanwhile: shorter than the time after which agents give it up (elastic/link.py).
PATIENCE_S = 8.0
AGAIN_S = 0.2

Result = TypeVar("Result")


def patiently(operation: Callable[[], Result]) -> Result:
    """Calls ``operation`` until it succeeds; one that fails half-way must allow to be repeated.

    The error does not tell whether a shared file system is back in a moment: it may be ESTALE, EIO, ENOSPC, EDQUOT, or
    ENOENT where a mount is missing.

    Raises:
        OSError: it has failed for ``PATIENCE_S`` seconds.
    """
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return operation()
        except OSError:
            if time.monotonic() > until:
                raise
        time.sleep(AGAIN_S)


def write_text(path: Path, text: str) -> None:
    """Replaces ``path`` by ``text`` in one step; a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, sort_keys=False) + "\n")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Appends one JSON object as a line, in one write. One process per file."""
    append_text(path, json.dumps(value, separators=(",", ":")) + "\n")


def append_text(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def line_end(path: Path) -> str:
    """What ends the last line of ``path`` where it was cut short, as by a full disk; "" for a whole one."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return "" if file.read() == b"\n" else "\n"
    return ""


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file; a last line that is still being written is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.endswith("\n"):
                try:
                    yield json.loads(line)
                except ValueError:
                    continue


def last_line(path: Path) -> dict[str, Any]:
    """The last whole line of a file of JSON objects, without reading what comes before."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            whole = file.read().rpartition(b"\n")[0]
    except FileNotFoundError:
        return {}
    try:
        return json.loads(whole.rpartition(b"\n")[2])
    except ValueError:
        return {}


GROUP_BITS = 0o070


def group_id(name: str) -> int:
    """The id of the group.

    Raises:
        UserError: there is none, or this user is not in it.
    """
    try:
        found = grp.getgrnam(name).gr_gid
    except KeyError:
        found = None
    own = {os.getgid(), os.getegid(), *os.getgroups()}
    if found is None or (found not in own and os.geteuid() != 0):
        what = "is no group here" if found is None else "is a group that you are not in"
        names = ", ".join(sorted(_names(own)))
        raise UserError(f"{name} {what}", where="run.group", fix=f"one of your groups: {names}")
    return found


def write_for_group() -> None:
    """Lets what this process and its children write be readable and writable for its group."""
    before = os.umask(0)
    os.umask(before & ~GROUP_BITS)


def share(directory: Path, name: str) -> None:
    """Gives ``directory`` and what is in it to the group; what is the group's already is left alone."""
    for path in directory.rglob("*"):
        share_one(path, name)
    share_one(directory, name)


def share_one(path: Path, name: str) -> None:
    """Gives one directory or file to the group, and nothing in it."""
    group, status = group_id(name), path.lstat()
    wanted = (status.st_mode & 0o700) >> 3 | (stat.S_ISGID if stat.S_ISDIR(status.st_mode) else 0)
    done = status.st_gid == group and status.st_mode & wanted == wanted
    if done or stat.S_ISLNK(status.st_mode) or status.st_uid != os.geteuid():
        return
    os.chown(path, -1, group)
    path.chmod(stat.S_IMODE(status.st_mode) | wanted)


def _names(groups: set[int]) -> Iterator[str]:
    for group in groups:
        try:
            yield grp.getgrgid(group).gr_name
        except KeyError:
            yield str(group)
