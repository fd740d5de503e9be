"""Keeps the copies of the user's code: in ``<run.root>/.code/<uid>``, where the runs of a root share one per content.

Only the user can enter the directory. A copy is used only if the user owns it and its content is the expected one.
A copy that no run below the root names any more is removed, at most once a day, when a new one is written.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from hpc_train.errors import UserError
from hpc_train.run.code import frozen_code
from hpc_train.run.directory import RunDirectory
from hpc_train.run.file_lock import exclusive
from hpc_train.run.files import concurrently
from hpc_train.run.owner import is_own, make_private
from hpc_train.run.record import RECORD

SHARED = ".code"
CACHE = "__pycache__"  # the folder of bytecode, which is no part of the content
UNUSED_S = 24 * 3600.0  # a submission uses a copy before the records of its runs name it
_NAME = re.compile(r"[0-9a-f]{16}")


def shared_copies(root: Path) -> Path | None:
    """Returns the directory of the caller's copies below a run root, which this creates.

    Returns:
        None if another user could replace it, or it cannot be created.
    """
    above = root / SHARED
    try:
        root.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            above.mkdir(mode=0o700)
            above.chmod(stat.S_ISVTX | root.stat().st_mode & 0o777)  # users of the root add their own directories
        status = above.lstat()
        if not stat.S_ISDIR(status.st_mode) or not (is_own(above) or status.st_uid in (0, root.stat().st_uid)):
            return None
        is_open = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
        own = above / str(os.geteuid())
        return None if is_open or not make_private(own) else own
    except OSError:
        return None


def content_digest(files: Iterable[tuple[str, int, bytes]]) -> str:
    """Returns the SHA-256 of files and links, which does not depend on the umask.

    Args:
        files: their names in the copy, modes and contents; the content of a link is its target.
    """
    whole = hashlib.sha256()
    for name, mode, content in sorted(files):
        kind = "link" if stat.S_ISLNK(mode) else "program" if mode & stat.S_IXUSR else "file"
        line = f"{kind} {hashlib.sha256(content).hexdigest()} {name}\0"
        whole.update(line.encode("utf-8", "surrogateescape"))
    return whole.hexdigest()


def digest_of_copy(copy: Path) -> str:
    """Returns the ``content_digest`` of the files in a copy.

    Raises:
        OSError: a file cannot be read.
    """
    paths = [
        os.path.join(folder, name)  # noqa: PTH118 - pathlib takes long for thousands of files
        for folder, below, names in os.walk(copy, onerror=_raise)
        if CACHE not in Path(folder).relative_to(copy).parts
        for name in (*names, *(each for each in below if os.path.islink(f"{folder}/{each}")))  # noqa: PTH114
    ]
    return content_digest(concurrently(lambda path: (os.path.relpath(path, copy), *_content(path)), paths))


def _raise(error: OSError) -> None:
    raise error


def _content(path: str) -> tuple[int, bytes]:
    """Returns the mode and the content of a file or link; other kinds of files have no content."""
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        return mode, os.fsencode(os.readlink(path))  # noqa: PTH115
    return mode, Path(path).read_bytes() if stat.S_ISREG(mode) else b""


def use_copy(copy: Path, content: str) -> bool:
    """Returns whether a copy exists and may be used, and keeps it from being removed for a day.

    One that another user owns, or with other content, is set aside.
    """
    if not os.path.lexists(copy):
        return False
    with exclusive(copy.parent / ".locks" / "copies"):
        with suppress(OSError):
            if stat.S_ISDIR(copy.lstat().st_mode) and is_own(copy) and digest_of_copy(copy) == content:
                os.utime(copy)
                return True
        if os.path.lexists(copy):
            aside = copy.with_name(f".damaged-{copy.name}-{secrets.token_hex(2)}")
            copy.rename(aside)
            print(f"note: the copied code in {copy} was changed; it is now {aside.name}", file=sys.stderr)
    return False


def remove_unnamed(copies: Path) -> None:
    """Removes shared copies that were not used for a day and that no run below the run root names.

    It is safe beside other submissions and live runs. Nothing is removed if a record cannot be read.

    Args:
        copies: the directory of the caller's copies.
    """
    stamp = copies / ".removal"
    with suppress(OSError):
        before = stamp.stat().st_mtime if stamp.exists() else 0.0
        stamp.touch()
        now = stamp.stat().st_mtime  # of the file server's clock
        if now - before < UNUSED_S:
            return
        unused = [path for path in copies.iterdir() if path.is_dir() and _is_unused(path, now)]
        for path in unused:
            if path.name.startswith((".damaged-", ".removed-")):
                shutil.rmtree(path, ignore_errors=True)
        old = [path for path in unused if _NAME.fullmatch(path.name)]
        named = _named(copies.parents[1]) if old else None
        for path in old if named is not None else ():
            if path.name not in (named or ()):
                _remove(path, now)


def _is_unused(copy: Path, now: float) -> bool:
    return now - copy.lstat().st_mtime > UNUSED_S


def _remove(copy: Path, now: float) -> None:
    with exclusive(copy.parent / ".locks" / "copies"):
        if not _is_unused(copy, now):  # a submission has used it meanwhile
            return
        removed = copy.with_name(f".removed-{copy.name}-{secrets.token_hex(2)}")
        copy.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)
    for patch in copy.parent.glob(f"{copy.name}*.patch"):
        patch.unlink(missing_ok=True)


def _named(root: Path) -> set[str] | None:
    """Returns the names of the copies in the records of all runs below ``root``; None if one cannot be read."""
    found = set()
    for path in _run_directories(root, set()):
        try:
            snapshot = RunDirectory(path).record().get("snapshot")
        except (UserError, OSError):
            if is_own(path):
                return None
            continue  # a run of another user that this user cannot have started
        if isinstance(snapshot, dict):
            found.add(Path(str(snapshot.get("snapshot"))).name)
    return found


def _run_directories(folder: Path, seen: set[tuple[int, int]]) -> Iterator[Path]:
    """Yields the directories with a record below ``folder``, also behind links."""
    status = folder.stat()
    if (status.st_dev, status.st_ino) in seen:
        return
    seen.add((status.st_dev, status.st_ino))
    if os.path.exists(folder / RECORD):  # noqa: PTH110 - Path.exists raises where the folder cannot be entered
        yield folder
        return
    try:
        entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".") and entry.is_dir()]
    except PermissionError:
        return
    for entry in entries:
        yield from _run_directories(Path(entry.path), seen)


def check_copy(run: RunDirectory) -> None:
    """Raises UserError if the content of the frozen code of ``run`` is not that with which it was frozen.

    Copies of earlier versions have no recorded content.
    """
    code = frozen_code(run)
    if code is None or code.content is None:
        return
    fix = f"restore it, or run the present code of {code.work_tree}: python -m hpc_train resume --code now {run.path}"
    try:
        found = digest_of_copy(Path(code.snapshot))
    except OSError as error:
        what = f"the copied code of the run cannot be read: {error.filename}: {error.strerror}"
        if isinstance(error, PermissionError):
            fix = "ask its owner to start it with run.snapshot=copy and run.group=GROUP, so that the group can read it"
        raise UserError(what, where=str(run.path), fix=fix) from error
    if found != code.content:
        what = f"the copied code in {code.snapshot} has changed since the run was frozen"
        raise UserError(what, where=str(run.path), fix=fix)
