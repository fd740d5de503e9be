"""The output of a node's workers in one file per attempt: lines prefixed by time and rank, limited in size.

A worker writes into a pipe and never waits for a file system; the agent empties the pipes.

The agent's own output goes nowhere when nobody reads it any more (a closed terminal, a launcher that was killed).

Else the first word about a failure would raise BrokenPipeError, in the thread that is about to restart the workers.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from hpc_train.run.files import patiently

LIMIT_BYTES = 100 * 2**20
KEPT_LINES = 500  # of each rank: an abort of a worker prints the stacks of all its threads below its cause
TAIL_LINES = 50  # of each rank, at the end of a file that is full
LONGEST_LINE = 64 * 1024


class WorkerLog:
    """One log file; ``write(rank, data)`` takes bytes as they come and writes whole lines."""

    def __init__(self, path: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        with suppress(OSError):  # see _put
            self._file = patiently(lambda: _open(path))
        self._room = limit_bytes
        self._limit = limit_bytes
        self._partial: dict[int, bytes] = {}
        self._tails: dict[int, deque[bytes]] = {}

    def write(self, rank: int, data: bytes) -> None:
        *lines, rest = (self._partial.get(rank, b"") + data).split(b"\n")
        if len(rest) > LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        self._partial[rank] = rest
        if lines:
            self._tails.setdefault(rank, deque(maxlen=KEPT_LINES)).extend(lines)
            head = b"%s [%d] " % (_now(), rank)
            self._append(b"".join(b"%s%s\n" % (head, line) for line in lines))

    def tail(self, rank: int, lines: int = 20) -> list[str]:
        """The last lines of a rank, also those that the file had no room for."""
        kept = [*self._tails.get(rank, ()), *filter(None, [self._partial.get(rank)])]
        return [line.decode(errors="replace") for line in kept[-lines:]]

    def close(self) -> None:
        """Writes what is left of unfinished lines; of a file that is full, the last lines of each rank."""
        for rank, rest in sorted(self._partial.items()):
            if rest:
                self.write(rank, b"\n")
        if self._file is None:
            return
        if self._room == 0:
            last = {rank: list(tail)[-TAIL_LINES:] for rank, tail in sorted(self._tails.items())}
            tails = [b"[%d] %s\n" % (rank, line) for rank, lines in last.items() for line in lines]
            self._put(b"--- the last lines of each rank ---\n" + b"".join(tails))
        if self._file is not None:
            self._file.close()

    def _append(self, data: bytes) -> None:
        if self._room == 0:
            return
        if len(data) > self._room:
            self._room = 0
            self._put(b"--- this log has reached its limit of %d bytes; the rest is left out ---\n" % self._limit)
            return
        self._room -= len(data)
        self._put(data)

    def _put(self, data: bytes) -> None:
        """A file system that is full or gone costs the log, not the training."""
        if self._file is None:
            return
        try:
            self._file.write(data)
        except OSError:
            self._file.close()
            self._file = None


def _open(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab", buffering=0)


def _now() -> bytes:
    """UTC, so that the files of several nodes can be merged: 2026-01-31T12:00:00.000."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").encode()[:23]


class _Unbroken:
    """A stream whose writes and flushes never raise OSError."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._let_go()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._let_go()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _let_go(self) -> None:
        """What is still in its buffer goes nowhere too: the end of the process would fail on it."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


@contextmanager
def nonfailing_streams() -> Iterator[None]:
    """Inside the ``with`` block, stdout and stderr are such streams."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Unbroken(sys.stdout), _Unbroken(sys.stderr)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
