"""Opens the files of run directories. Their content is untrusted data, since another user may have prepared them.

A file is opened only if it is a regular file below the run directory and not too large. Thus a pipe or a device can
neither block the reader nor feed it without end. A symbolic link in the path is followed only if this user or root
created it, for example to store a part of the run on another file system. All code opens the files of a run directory
through this module.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import BinaryIO

from hpc_train.errors import UserError

LARGEST = 8 << 30  # bytes of a file with a line per step or event
SMALL = 64 << 20  # bytes of a file that is read whole
_PIECE = 1 << 20  # bytes
CONFIG = 4 << 20  # bytes of a config; parsing a file of this size takes seconds
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class DamagedFile(UserError, ValueError):
    """Reports that a file is damaged or is not a regular file. An interrupted write does not damage small files, which
    hpc_train replaces atomically."""


def open_file(path: Path, below: Path, largest: int = LARGEST) -> BinaryIO:
    """Opens the regular file ``path`` for reading.

    Args:
        below: the directory that contains the file at any depth. The path to this directory may contain symbolic links.
        largest: the maximum size in bytes; a larger file is refused.

    Raises:
        DamagedFile: the path is not a regular file, leads through a symbolic link of another user, or is too large.
        OSError: the file does not exist or cannot be opened.
    """
    descriptor = _descriptor(path, below, os.O_RDONLY)
    size = os.fstat(descriptor).st_size
    if size > largest:
        os.close(descriptor)
        raise _damaged(path, f"has {size:,} bytes, but at most {largest:,} are read")
    return os.fdopen(descriptor, "rb")


def open_to_append(path: Path, below: Path) -> BinaryIO:
    """Opens ``path`` for unbuffered appending and creates it if it does not exist.

    Raises OSError if it cannot be opened, is not a regular file, or leads through a symbolic link of another user.
    """
    try:
        descriptor = _descriptor(path, below, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    except DamagedFile as error:
        raise OSError(errno.EINVAL, error.what) from None
    return os.fdopen(descriptor, "ab", buffering=0)


def read_file(path: Path, below: Path, largest: int = SMALL) -> bytes:
    """Returns the content of ``path``; arguments and errors are as for ``open_file``."""
    content = bytearray()
    with open_file(path, below, largest) as file:  # in pieces: a read of n bytes allocates them in advance
        while piece := file.read(min(_PIECE, largest - len(content))):
            content += piece
    return bytes(content)


def read_tail(path: Path, below: Path, size: int) -> str:
    """Returns the last ``size`` bytes of ``path`` as text; errors are as for ``open_file``."""
    with open_file(path, below) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - size))
        return file.read(size).decode(errors="replace")


def resolved_below(path: Path, folders: Sequence[Path]) -> tuple[Path, Path] | None:
    """Returns ``path`` and the directory among ``folders`` that contains it; None if no directory does.

    If the names alone do not show it, symbolic links are resolved: a recorded path may lead through directories that
    were since renamed and replaced by links.
    """
    for folder in folders:
        if path.is_relative_to(folder) and path != folder:
            return path, folder
    real = Path(os.path.realpath(path))
    for folder in map(Path, map(os.path.realpath, folders)):
        if real.is_relative_to(folder) and real != folder:
            return real, folder
    return None


@cache
def tell_once(note: str) -> None:
    """Prints ``note`` on standard error, once per process."""
    print(note, file=sys.stderr)


def _descriptor(path: Path, below: Path, flags: int) -> int:
    """Returns a descriptor of the regular file ``path`` below the directory ``below``."""
    if path == below or not path.is_relative_to(below) or ".." in path.relative_to(below).parts:
        raise _damaged(path, f"is not a file below {below}")
    names = path.relative_to(below).parts
    folder = os.open(below, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names[:-1]:
            inner = _opened(name, folder, os.O_PATH | os.O_DIRECTORY)
            os.close(folder)
            folder = inner
        descriptor = _opened(names[-1], folder, flags | os.O_NONBLOCK)
    except OSError as error:
        error.filename = str(path)
        if error.errno == errno.ELOOP or (error.errno == errno.ENOTDIR and _has_link(below, names)):
            raise _damaged(path, "is a symbolic link of another user, or lies behind one") from None
        if error.errno == errno.ENOTDIR:
            raise _damaged(path, "lies below a name that is not a directory") from None
        if error.errno == errno.ENXIO:
            raise _damaged(path, "is a socket or a pipe instead of a regular file") from None
        raise
    finally:
        os.close(folder)
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise _damaged(path, f"is {_KINDS.get(kind, 'a special file')} instead of a regular file")
    return descriptor


def _opened(name: str, folder: int, flags: int) -> int:
    """Returns a descriptor of the entry ``name`` in the directory with the descriptor ``folder``."""
    flags |= os.O_CLOEXEC
    try:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666, dir_fd=folder)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR) or (target := _target(name, folder)) is None:
            raise
    return os.open(target, flags, 0o666, dir_fd=folder)


def _target(name: str, folder: int) -> str | None:
    """Returns the target of the symbolic link ``name`` if this user or root created it, otherwise None."""
    link = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        status = os.fstat(link)
        trusted = stat.S_ISLNK(status.st_mode) and status.st_uid in (os.geteuid(), 0)
        return os.readlink("", dir_fd=link) if trusted else None
    finally:
        os.close(link)


def _has_link(below: Path, names: Iterable[str]) -> bool:
    path = below
    for name in names:
        path /= name
        if path.is_symlink():
            return True
    return False


def _damaged(path: Path, problem: str) -> DamagedFile:
    return DamagedFile(f"{path} {problem}", where=str(path), fix="restore the file, or remove it")
