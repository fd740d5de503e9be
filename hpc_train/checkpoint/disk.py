"""The few calls by which checkpoints change what is on disk. Whatever a save or a removal does goes through here.

So a test can record them, make the n-th one fail, or end the process there; and what has to be flushed and synced is
said once.
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
    """A new file that is hashed (xxh3-128) as it is written. It is on disk when ``close`` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.failure: OSError | None = None  # the first; who calls ``write`` may hide it
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
        """Nothing is asked of the disk before the end."""

    def close(self) -> None:
        """Hands Python's buffer to the kernel, then the kernel's to the disk; in this order."""
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            file.flush()
            sync(file.fileno())
        finally:
            file.close()

    def abandon(self) -> None:
        """Closes without a promise."""
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(OSError):  # what is still buffered does not fit either
                file.close()

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


def create(path: Path) -> BinaryIO:
    """Opens a new file for writing.

    Raises:
        FileExistsError: something of that name is there.
    """
    return path.open("xb", buffering=1 << 16)


def write(file: BinaryIO, data: memoryview) -> None:
    file.write(data)


def sync(descriptor: int) -> None:
    os.fsync(descriptor)


def sync_directory(path: Path) -> None:
    """Forces the names in a directory to disk, where the file system knows of such a thing."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Makes a new directory, for good.

    Raises:
        FileExistsError: something of that name is there.
    """
    path.mkdir()
    sync_directory(path.parent)


def rename(source: Path, target: Path) -> None:
    """Renames, for good, within one directory."""
    source.rename(target)
    sync_directory(target.parent)


def unlink(path: Path) -> None:
    """Removes a file, for good."""
    path.unlink()
    sync_directory(path.parent)


def remove(path: Path) -> None:
    """Removes a directory with all in it, as far as that is possible; never follows a link."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)
