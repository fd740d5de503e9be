"""Names of users and their directories, which are found even where a user id has no name.

A container started with ``--user``, or a node that has lost its directory service (LDAP, sssd), has no entry for the
user in its list of users, and Python's own functions raise there.
"""

from __future__ import annotations

import os
import pwd
import tempfile
from functools import cache
from pathlib import Path


def name_of_user(uid: int) -> str:
    """Returns the name of the user ``uid``, or ``user N`` if it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def own_name() -> str:
    """Returns the login name of the user of this process, or the number of the user id if it has none."""
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):  # in the order of getpass.getuser
        if name := os.environ.get(variable):
            return name
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def user_cache() -> Path:
    """Returns the directory in which hpc_train caches files of this user: in XDG_CACHE_HOME or the home directory, or a
    temporary one if the home directory is unknown.
    """
    chosen = os.environ.get("XDG_CACHE_HOME")
    if chosen:
        return Path(chosen, "hpc_train")
    try:
        return Path.home() / ".cache" / "hpc_train"
    except RuntimeError:
        return Path(_temporary_directory(prefix="hpc_train-cache-"))


_temporary_directory = cache(tempfile.mkdtemp)  # one per process
