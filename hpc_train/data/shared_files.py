"""Finds files that a dataset opens in its constructor and that its loader processes would share.

Forked processes share the position of an open file. Where one seeks, another one reads, so items get the content of
other items. Files that are mapped, or that are read at given positions (``os.pread``), are not affected. Files of HDF5
and SQLite must not be used after a fork.
"""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hpc_train.data.dataset import Dataset

_DESCRIPTORS = Path("/proc/self/fd")
_READS_S = 60.0  # time for the items that are read in another process
_NOT_FORKED = (b"\x89HDF\r\n\x1a\n", b"SQLite format 3\0")  # beginnings of files that a forked process must not use


class OpenFile(NamedTuple):
    """Identifies an open file."""

    descriptor: int
    device: int
    inode: int
    path: str


def open_files() -> frozenset[OpenFile]:
    """Returns the regular files that this process has open for reading; none without ``/proc``."""
    return frozenset(_open_files())


def _open_files() -> Iterator[OpenFile]:
    for entry in _DESCRIPTORS.iterdir() if _DESCRIPTORS.is_dir() else []:
        descriptor = int(entry.name)
        try:
            status = os.fstat(descriptor)
            access = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
            path = str(entry.readlink())
        except OSError:  # it was closed meanwhile
            continue
        if stat.S_ISREG(status.st_mode) and access != os.O_WRONLY:
            yield OpenFile(descriptor, status.st_dev, status.st_ino, path)


def shared_file(dataset: Dataset, before: frozenset[OpenFile]) -> str:
    """Returns the path of a file that loader processes of ``dataset`` would share; an empty string if there is none.

    If the constructor has left files open, some items are read in another process, as loader processes do, to see
    whether they change the positions in these files.

    Args:
        before: the open files before the construction of the dataset.
    """
    opened = sorted(open_files() - before)
    unsafe = next((file.path for file in opened if os.pread(file.descriptor, 16, 0).startswith(_NOT_FORKED)), "")
    if unsafe or not opened or not len(dataset):
        return unsafe
    moved = _moved_by_items(dataset, opened)
    if moved is None:
        return ""
    return opened[moved].path


def _moved_by_items(dataset: Dataset, files: Sequence[OpenFile]) -> int | None:
    """Reads some items of ``dataset`` in a forked process, whose errors the loader processes report later.

    The positions in ``files`` are changed by one byte meanwhile, since reading may end where the constructor has ended.

    Returns the number of the first of ``files`` whose position an item changes; None if there is none.
    """
    before = [os.lseek(file.descriptor, 0, os.SEEK_CUR) for file in files]
    marks = [position - 1 if position else 1 for position in before]
    child = os.fork()
    if child == 0:
        try:
            _move(files, marks)
            for index in sorted({0, len(dataset) // 2, len(dataset) - 1}):
                dataset.item(index, 0)
        finally:
            changed = [os.lseek(file.descriptor, 0, os.SEEK_CUR) for file in files]
            moved = (number for number, pair in enumerate(zip(changed, marks, strict=True), 1) if pair[0] != pair[1])
            os._exit(min(next(moved, 0), 255))
    timer = threading.Timer(_READS_S, os.kill, (child, signal.SIGKILL))
    timer.start()
    _, status = os.waitpid(child, 0)
    timer.cancel()
    _move(files, before)
    code = os.waitstatus_to_exitcode(status)
    if code > 0:
        return code - 1
    return None


def _move(files: Sequence[OpenFile], positions: Sequence[int]) -> None:
    for file, position in zip(files, positions, strict=True):
        os.lseek(file.descriptor, position, os.SEEK_SET)
