"""The output of a node's workers in one file per attempt.

Workers write into pipes that the agent drains, and a thread of the agent writes the file (``run/file_writer.py``), so
neither waits for a file system. Lines are prefixed by time and rank, and the file has a size limit.
"""

from __future__ import annotations

import re
from collections import deque
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from hpc_train.opening import open_to_append
from hpc_train.run.directory import RunDirectory
from hpc_train.run.file_writer import FileWriter

LIMIT_BYTES = 100 * 2**20
RETAINED_LINES = 500  # per rank; an aborting worker prints the stacks of all threads after the cause
TAIL_LINES = 50  # per rank, appended to a log that reached its limit
LONGEST_LINE = 64 * 1024


class WorkerLog:
    """Writes one log file. ``write(rank, data)`` takes bytes as they arrive and writes complete lines."""

    def __init__(self, path: Path, writer: FileWriter, limit_bytes: int = LIMIT_BYTES) -> None:
        self.path = path
        self._writer = writer
        self._file: BinaryIO | None = None  # used by the writer's thread only
        self._room = limit_bytes
        self._limit = limit_bytes
        self._partial: dict[int, bytes] = {}
        self._tails: dict[int, deque[bytes]] = {}

    def write(self, rank: int, data: bytes) -> None:
        *lines, rest = (self._partial.get(rank, b"") + data).split(b"\n")
        if len(rest) > LONGEST_LINE:
            lines = [*lines, rest]
            rest = b""
        self._partial[rank] = rest
        if lines:
            self._tails.setdefault(rank, deque(maxlen=RETAINED_LINES)).extend(lines)
            head = b"%s [%d] " % (_now(), rank)
            self._append(b"".join(b"%s%s\n" % (head, line) for line in lines))

    def tail(self, rank: int, lines: int = 20) -> list[str]:
        """Returns the last lines of a rank, including those that did not fit into the file."""
        retained = [*self._tails.get(rank, ()), *filter(None, [self._partial.get(rank)])]
        return [line.decode(errors="replace") for line in retained[-lines:]]

    def close(self) -> None:
        """Writes unfinished lines, and after the limit was reached, the last lines of each rank.

        Returns when the file is complete, unless the file system fails or does not respond.
        """
        for rank, rest in sorted(self._partial.items()):
            if rest:
                self.write(rank, b"\n")
        if self._room == 0:
            last = {rank: list(tail)[-TAIL_LINES:] for rank, tail in sorted(self._tails.items())}
            tails = [b"[%d] %s\n" % (rank, line) for rank, lines in last.items() for line in lines]
            self._put(b"--- the last lines of each rank ---\n" + b"".join(tails))
        self._writer.put(self.path, lambda again: self._close_file())

    def _append(self, data: bytes) -> None:
        if self._room == 0:
            return
        if len(data) > self._room:
            self._room = 0
            self._put(b"--- this log has reached its limit of %d bytes; the rest is omitted ---\n" % self._limit)
            return
        self._room -= len(data)
        self._put(data)

    def _put(self, data: bytes) -> None:
        left = memoryview(data)

        def write(again: bool) -> None:
            nonlocal left
            while left:
                left = left[self._write(left) :]

        self._writer.put(self.path, write, len(data), wait=False)

    def _write(self, data: memoryview) -> int:
        """Writes a part of ``data``, returns its size; opens the file again after an error: it may be stale."""
        if self._file is None:
            self._file = _open(self.path)
        try:
            return self._file.write(data) or 0
        except OSError:
            with suppress(OSError):
                self._close_file()
            raise

    def _close_file(self) -> None:
        file = self._file
        self._file = None
        if file is not None:
            file.close()


RETAINED_ATTEMPTS = 10
# the number in the names of stacks, collectives and NCCL's logs; answers to `stacks` begin with another number
_OF_ATTEMPT = re.compile(r"(?:(?:hang|slow)-.*-|collectives-|nccl-|)(\d{3,})(?:\.txt$|-rank-)")


def prune_logs(run: RunDirectory, attempt: int) -> None:
    """Removes the stacks and NCCL's logs, a file per rank, of all but the last ``RETAINED_ATTEMPTS`` attempts."""
    for folder in (run.logs / "stacks", run.logs / "nccl"):
        for path in folder.iterdir() if folder.is_dir() else ():
            match = _OF_ATTEMPT.match(path.name)
            if match is not None and int(match[1]) <= attempt - RETAINED_ATTEMPTS:
                path.unlink(missing_ok=True)


def _open(path: Path) -> BinaryIO:
    path.parent.mkdir(exist_ok=True)
    return open_to_append(path, path.parent)


def _now() -> bytes:
    """Returns the time in UTC, so that files of several nodes can be merged: 2026-01-31T12:00:00.000."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").encode()[:23]
