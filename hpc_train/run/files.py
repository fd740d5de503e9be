"""Small files on shared file systems: atomic JSON writes, appended lines, and group permissions for ``run.group``.

With ``run.group`` all members of a Unix group may read, resume and remove a run. Directories pass the group on (setgid)
and the processes of the run write for the group whatever the umask; without it the user's umask applies.
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

TAIL_BYTES = 8192  # longer than a line of metrics
# The rendezvous server blocks during that time, so this is shorter than the timeout of its clients (elastic/client.py).
PATIENCE_S = 8.0
RETRY_S = 0.2

Result = TypeVar("Result")


def patiently(operation: Callable[[], Result]) -> Result:
    """Retries ``operation``, which must be idempotent, until it succeeds.

    An error does not show whether a shared file system will recover: it may be ESTALE, EIO, ENOSPC, EDQUOT, or ENOENT
    if a mount is missing.

    Raises:
        OSError: the operation has failed for ``PATIENCE_S`` seconds.
    """
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return operation()
        except OSError:
            if time.monotonic() > until:
                raise
        time.sleep(RETRY_S)


def write_text(path: Path, text: str) -> None:
    """Replaces the content of ``path`` by ``text`` atomically; a reader sees the old file or the new one."""
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
    """Appends one JSON object as a line, after a line that was truncated. Only one process may write to a file."""
    append_text(path, line_end(path) + json_line(value))


def json_line(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"


def append_text(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def line_end(path: Path) -> str:
    """Returns the newline that is missing if the last line of ``path`` was truncated, e.g. by a full disk; ""
    otherwise.
    """
    with suppress(OSError), path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return "" if file.read() == b"\n" else "\n"
    return ""


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects of a file; skips a last line that is still being written."""
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
    """Returns the last complete JSON object of a file without reading the earlier lines; {} if there is none."""
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
    """Returns the id of the Unix group ``name``.

    Raises:
        UserError: the group does not exist, or this user is not a member.
    """
    try:
        found = grp.getgrnam(name).gr_gid
    except KeyError:
        found = None
    own = {os.getgid(), os.getegid(), *os.getgroups()}
    if found is None or (found not in own and os.geteuid() != 0):
        what = "is not a group on this machine" if found is None else "is a group that you do not belong to"
        names = ", ".join(sorted(_names(own)))
        raise UserError(f"{name} {what}", where="run.group", fix=f"set run.group to one of your groups: {names}")
    return found


def write_for_group() -> None:
    """Sets the umask so that the group can read and write what this process and its children write."""
    before = os.umask(0)
    os.umask(before & ~GROUP_BITS)


def share(directory: Path, name: str) -> None:
    """Gives ``directory`` and its contents to the group; entries that already belong to the group are not changed."""
    for path in directory.rglob("*"):
        share_one(path, name)
    share_one(directory, name)


def share_one(path: Path, name: str) -> None:
    """Gives one directory or file to the group, without its contents."""
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
