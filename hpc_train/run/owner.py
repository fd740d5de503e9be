"""Checks who owns a run, whom the caller trusts, and what each command may do with a run of another user.

The frozen code, the lines of ``cluster.setup``, the interpreter and the weights of a run come from files that their
owner may have changed at any time, so a command that executes or loads them gives that owner the rights of the caller.
Files of another user are therefore used only if the caller says ``--trust-owner``, or the settings of the caller or of
the site (``config/settings.py``) name this user or one of the user's groups:

    trust:
      owners: [alice, 5001]
      groups: [vision]

Files of root are trusted. ``run.group`` sets the modes of files and does not affect whom the reader trusts.
"""

from __future__ import annotations

import grp
import hashlib
import os
import pwd
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hpc_train.config.run_path import default_root
from hpc_train.config.schema import Config
from hpc_train.config.settings import Settings, read_settings, user_file
from hpc_train.errors import UserError
from hpc_train.opening import tell_once
from hpc_train.run.code import frozen_code
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import is_present
from hpc_train.run.record import RECORD
from hpc_train.users import name_of_user

TRUST = "--trust-owner"
OF_OTHERS = ".others"  # the folder below the run root for files that commands write about runs of other users


def check_owner(files: Iterable[Path], path: Path, trust_owner: bool = False) -> bool:
    """Checks that the caller trusts the owners of ``files``, and prints whose files are used if they are not the
    caller's.

    Args:
        files: the files that decide which code runs and which weights are loaded. Reading ends at the first file of an
            owner who is not trusted.
        path: the run directory, or the directory that holds the weights.
        trust_owner: whether the caller has passed ``--trust-owner``.

    Returns:
        Whether files of other users are used.

    Raises:
        UserError: a file belongs to a user whom the caller does not trust.
    """
    trusted: dict[int, str] = {}  # how each owner is trusted
    for file, user in foreign_files(files, path):
        if user in trusted:
            continue
        how = TRUST if trust_owner else trusting_file(user)
        if how is None:
            raise UserError(
                f"{file} belongs to {name_of_user(user)}, and this command executes code or loads weights of {path} as "
                f"{name_of_user(os.geteuid())}",
                where=str(path),
                fix=f"add {TRUST} if you trust the owner, or name the owner or a group in {user_file()}: "
                f"`trust: {{owners: [{_name_or_id(user)}]}}`",
            )
        trusted[user] = str(how)
    if trusted:
        names = ", ".join(name_of_user(user) for user in sorted(trusted))
        how = " and ".join(dict.fromkeys(trusted.values()))
        tell_once(f"note: code and weights of {names} in {path} run as you, trusted by {how}")
    return bool(trusted)


def foreign_files(files: Iterable[Path], path: Path) -> Iterator[tuple[Path, int]]:
    """Yields the ``files`` that neither the caller nor root owns, with the ids of their owners.

    Args:
        path: a directory of the file system that holds them. A file server may give all files one owner, which new
            files of the caller get as well.
    """
    trusted = {os.geteuid(), 0}
    of_new_files: set[int] | None = None
    for file in files:
        users = set()
        with suppress(OSError):  # checks the file and, if it is a symbolic link, the link
            users.add(file.lstat().st_uid)
            users.add(file.stat().st_uid)
        for user in users - trusted:
            if of_new_files is None:
                of_new_files = _owner_of_new_files(path)
            if user not in of_new_files:
                yield file, user


def deciding_files(run: RunDirectory) -> Iterator[Path]:
    """Yields the files and directories that decide which code a run executes and which weights it loads.

    The directory and its entries come first: the record, which names the others, is read only after that. If nobody
    else can write to a directory, all files in it belong to its owner, so only the directory is checked. This keeps
    the check cheap, since every agent of a job makes it.
    """
    yield run.path
    yield from map(Path, _listed(run.path))
    if not is_present(run.path / RECORD):
        yield from map(Path, _listed(run.events))  # the record is rebuilt from them
    yield from _entries(run.checkpoints)
    yield from _entries(run.compiled)
    code = frozen_code(run)
    if code is not None:
        for path in map(Path, dict.fromkeys((code.snapshot, *code.paths))):
            yield path.parent  # the parent of shared copies, which only their owner can enter
            yield from files_below(path)
    source = run.record().get("forked_from")
    if isinstance(source, str) and not any(run.checkpoints.glob("step-*")):
        yield from deciding_weights(RunDirectory(Path(source)))


def deciding_weights(source: RunDirectory) -> Iterator[Path]:
    """Yields the files and directories that decide which weights a fork of ``source`` starts from."""
    yield source.path
    yield from map(Path, _listed(source.path))
    yield from _entries(source.checkpoints)


def files_below(directory: Path) -> Iterator[Path]:
    """Yields a directory, its entries, and the entries of directories that others can write."""
    yield directory
    yield from _entries(directory)


def foreign_owner(run: RunDirectory) -> int | None:
    """Returns the id of another user who owns the directory of a run or an entry of it; None if nobody does."""
    return next((user for _, user in foreign_files(files_below(run.path), run.path)), None)


def _entries(directory: Path) -> Iterator[Path]:
    """Yields the entries of a directory, and the content of those directories that other users can write."""
    for entry in _listed(directory):
        path = Path(entry.path)
        yield path
        with suppress(OSError):
            if entry.is_dir(follow_symlinks=False) and _lets_others_write(entry.stat(follow_symlinks=False)):
                yield from _entries(path)


def _listed(directory: Path) -> list[os.DirEntry[str]]:
    """Returns the entries of a directory; none if it is missing or not readable, which the command then reports."""
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except OSError:
        return []


def _lets_others_write(status: os.stat_result) -> bool:
    """Returns whether other users can write a file or directory: all users, or the members of a group."""
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_private(status.st_gid)


@cache
def _is_private(group: int) -> bool:
    """Returns whether a group is the one of the caller alone, which has the same name on most Linux systems."""
    try:
        return grp.getgrgid(group).gr_name == pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False


def output_directory(directory: Path) -> Path:
    """Returns the directory for files that commands write about the run or sweep in ``directory``: itself if the caller
    owns it.

    For a run of another user, it is ``.others/NAME-HASH`` below the run root of the caller, which this creates.

    Raises:
        UserError: ``.others`` belongs to another user.
    """
    if is_own(directory):
        return directory
    digest = hashlib.sha256(os.fsencode(directory.absolute())).hexdigest()[:8]
    parent = Path(default_root()).expanduser().absolute() / OF_OTHERS
    if not make_private(parent):
        raise UserError(
            f"{parent} belongs to another user, so nothing about {directory} is written there",
            where="run.root",
            fix="export HPC_TRAIN_ROOT=DIR with a directory that you own",
        )
    output = parent / f"{directory.name}-{digest}"
    output.mkdir(exist_ok=True)
    return output


def is_own(directory: Path) -> bool:
    """Returns whether the caller owns a directory, or the file server gives the caller's files the same owner."""
    user = directory.stat().st_uid
    return user == os.geteuid() or user in _owner_of_new_files(directory)


def make_private(directory: Path) -> bool:
    """Creates a directory that only the caller can enter; returns whether it is one.

    Another user may have made it in advance, or a link with this name.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or not is_own(directory):
        return False
    if status.st_mode & 0o077:
        directory.chmod(0o700)
    return True


def warn_if_open(run: RunDirectory, config: Config) -> None:
    """Prints one line if everybody may replace files of ``run``: in its directory, or by renaming it in ``run.root``.

    Directories that hpc_train creates are not open, but it may find one that is there already.
    """
    root = Path(config.run.root).expanduser().absolute()
    folders = [root, *(parent for parent in run.path.parents if parent.is_relative_to(root)), run.path]
    opened = []
    for path in dict.fromkeys([*folders, run.checkpoints, run.code]):
        with suppress(OSError):
            mode = path.stat().st_mode
            if (
                mode & stat.S_IWOTH and not mode & stat.S_ISVTX
            ):  # as in /tmp, only owners can remove files in a sticky directory
                opened.append(path)
    if not opened:
        return
    foreign = [path for path in opened if path.stat().st_uid != os.geteuid()]
    fix = f"run `chmod o-w {' '.join(map(str, opened))}`"
    if foreign and os.geteuid() != 0:
        fix = f"ask {name_of_user(foreign[0].stat().st_uid)} to do so: {fix}"
    print(
        f"warning: every user of this system can replace the config, code and checkpoints of this run, because "
        f"{', '.join(map(str, opened))} {'is' if len(opened) == 1 else 'are'} writable by all: {fix}, or set another "
        "run.root",
        file=sys.stderr,
    )


def _owner_of_new_files(directory: Path) -> set[int]:
    """Returns the user id that new files get in the directory; another one where a file server maps all users to it."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            return {os.fstat(file.fileno()).st_uid}
    except OSError:
        return set()


def _name_or_id(user: int) -> str | int:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return user


TRUST_EXAMPLE = "trust: {owners: [alice], groups: [vision]}"


@dataclass(frozen=True)
class Trust:
    """Holds the ids of trusted users and groups."""

    owners: frozenset[int] = frozenset()
    groups: frozenset[int] = frozenset()

    def covers(self, user: int) -> bool:
        """Returns whether the user with this id is trusted."""
        return user in self.owners or (bool(self.groups) and not self.groups.isdisjoint(_groups_of(user)))


def trusting_file(user: int) -> Path | None:
    """Returns the file of settings, the user's or the site's, that names this user as trusted; None if none does.

    Raises UserError if a file cannot be used, or its trust has another form.
    """
    return next((settings.path for settings in read_settings() if _trust(settings).covers(user)), None)


def _trust(settings: Settings) -> Trust:
    path = settings.path
    trust = settings.trust
    if trust is None:
        return Trust()
    if not isinstance(trust, dict) or trust.keys() - {"owners", "groups"}:
        raise _bad_trust(path, "may only have the keys owners and groups below trust")
    owners = _trusted_ids(path, "owners", trust.get("owners"), lambda name: pwd.getpwnam(name).pw_uid)
    groups = _trusted_ids(path, "groups", trust.get("groups"), lambda name: grp.getgrnam(name).gr_gid)
    return Trust(owners, groups)


def _trusted_ids(path: Path, key: str, values: Any, id_of: Callable[[str], int]) -> frozenset[int]:
    """Returns the ids of a list of names and ids."""
    if values is None:
        return frozenset()
    if not isinstance(values, list) or not all(type(value) in (int, str) for value in values):
        raise _bad_trust(path, f"needs a list of names or ids as trust.{key}")
    ids = set()
    for value in values:
        try:
            ids.add(value if isinstance(value, int) else id_of(value))
        except KeyError:
            raise _bad_trust(path, f"names {value!r} in trust.{key}, which this machine does not know") from None
    return frozenset(ids)


def _groups_of(user: int) -> set[int]:
    try:
        account = pwd.getpwuid(user)
    except KeyError:
        return set()
    return set(os.getgrouplist(account.pw_name, account.pw_gid))


def _bad_trust(path: Path, what: str) -> UserError:
    return UserError(f"{path} {what}", where=str(path), fix=f"correct the file, as in: {TRUST_EXAMPLE}")


class Access(StrEnum):
    """Names the three classes of access to a run."""

    READS = "reads"  # allowed for every run; files are written to a directory of the caller
    ACTS = "acts"  # acts on processes and jobs of the caller that belong to the run
    EXECUTES = "executes"  # runs code of the run or loads its weights, so the caller must trust the owner


# each command that takes a run; docs/howto/shared-runs.md has the same table
ACCESS: Mapping[str, Access] = MappingProxyType(
    {
        "status": Access.READS,
        "top": Access.READS,
        "logs": Access.READS,
        "why": Access.READS,
        "compare": Access.READS,
        "compare --baseline": Access.READS,
        "plot": Access.READS,
        "report": Access.READS,
        "support": Access.READS,  # only for the caller's own runs
        "wait": Access.READS,
        "sync": Access.READS,
        "checkpoint list": Access.READS,
        "checkpoint verify": Access.READS,
        "cancel": Access.ACTS,
        "resize": Access.ACTS,
        "stacks": Access.ACTS,
        "debug": Access.ACTS,
        "train": Access.EXECUTES,
        "freeze": Access.EXECUTES,
        "agent": Access.EXECUTES,
        "resume": Access.EXECUTES,
        "retry": Access.EXECUTES,
        "evaluate": Access.EXECUTES,
        "generate": Access.EXECUTES,
        "checkpoint verify --submit": Access.EXECUTES,  # the job runs cluster.setup of the run
        "checkpoint export": Access.EXECUTES,
        "checkpoint promote": Access.EXECUTES,
        "checkpoint release": Access.EXECUTES,
        "checkpoint import": Access.EXECUTES,
    }
)


def open_run(run: RunDirectory, command: str, trust_owner: bool = False) -> bool:
    """Checks that ``command`` may use ``run``. Every command that takes a run calls this before it uses the run.

    Args:
        command: a key of ``ACCESS``.
        trust_owner: whether the caller has passed ``--trust-owner``.

    Returns:
        Whether the command executes files of other users, whom the caller trusts. Jobs then need ``--trust-owner``.

    Raises:
        UserError: the command executes the run, which has files of a user whom the caller does not trust.
    """
    if ACCESS[command] is not Access.EXECUTES:
        return False
    return check_owner(deciding_files(run), run.path, trust_owner)
