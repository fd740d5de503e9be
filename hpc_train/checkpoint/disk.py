"""Provides the calls with which saves and removals of checkpoints change the disk, flushed and synced.

Tests replace these calls to record them, to make the n-th one fail, or to kill the process there.
"""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import xxhash


class HashedFile:
    """Writes a new file and computes its xxh3-128 digest; the file is on disk when ``close`` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.failure: OSError | None = None  # the first error, which the caller of ``write`` may swallow
        self._hash = xxhash.xxh3_128()
        self._file: BinaryIO | None = create(path)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        assert self._file is not None, "closed"
        view = memoryview(data).cast("B")
        try:
            write(self._file, view)
        except OSError as error:
            self.failure = self.failure or error
            raise
        self._hash.update(view)
        self.size += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Does nothing; ``close`` flushes the whole file."""

    def close(self) -> None:
        """Flushes Python's buffer to the kernel, then syncs the kernel's buffer to disk."""
        if self._file is None:
            return
        file = self._file
        self._file = None
        try:
            file.flush()
            sync(file.fileno())
        finally:
            file.close()

    def abandon(self) -> None:
        """Closes the file without syncing it."""
        if self._file is not None:
            file = self._file
            self._file = None
            with suppress(OSError):  # flushing the buffer fails as well on a full disk
                file.close()

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


def write_file(path: Path, data: bytes | bytearray) -> HashedFile:
    """Writes a new file, syncs it to disk and returns it closed.

    Raises:
        OSError: it exists, or could not be written.
    """
    file = HashedFile(path)
    try:
        file.write(data)
        file.close()
    finally:
        file.abandon()
    return file


def create(path: Path) -> BinaryIO:
    """Opens a new file for writing.

    Raises:
        FileExistsError: the path exists.
    """
    return path.open("xb", buffering=1 << 16)


def write(file: BinaryIO, data: memoryview) -> None:
    file.write(data)


def sync(descriptor: int) -> None:
    os.fsync(descriptor)


def sync_directory(path: Path) -> None:
    """Syncs the entries of a directory to disk if the file system supports that."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Makes a new directory and syncs its parent.

    Raises:
        FileExistsError: the path exists.
    """
    path.mkdir()
    sync_directory(path.parent)


def rename(source: Path, target: Path) -> None:
    """Renames within one directory and syncs that directory."""
    source.rename(target)
    sync_directory(target.parent)


def unlink(path: Path) -> None:
    """Removes a file and syncs its directory."""
    path.unlink()
    sync_directory(path.parent)


def remove(path: Path) -> None:
    """Removes as much of a directory tree as possible, without following links."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)
