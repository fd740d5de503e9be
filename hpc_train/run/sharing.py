"""``run.group``: a run that all members of a Unix group may read, resume and remove.

Directories pass the group on (setgid), and the processes of the run write for the group whatever the umask says;
without ``run.group`` the user's umask is kept.
"""

from __future__ import annotations

import grp
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from hpc_train.config.errors import ConfigError

GROUP_BITS = 0o070


def group_id(name: str) -> int:
    """The id of the group.

    Raises:
        ConfigError: there is none, or this user is not in it.
    """
    try:
        found = grp.getgrnam(name).gr_gid
    except KeyError:
        found = None
    own = {os.getgid(), os.getegid(), *os.getgroups()}
    if found is None or (found not in own and os.geteuid() != 0):
        what = "is no group here" if found is None else "is a group that you are not in"
        names = ", ".join(sorted(_names(own)))
        raise ConfigError(f"{name} {what}", where="run.group", mend=f"one of your groups: {names}")
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
