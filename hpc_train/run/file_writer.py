"""Writes small files in a thread, so that a file system that fails or hangs neither ends nor delays a job.

A caller hands over a write and continues. A write that fails is kept in memory and repeated until it succeeds; the
writes of one file keep their order. A process in a system call on a hung file system cannot be interrupted (state D),
so only the thread makes these calls. It ends when nothing is left to write.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hpc_train.run.files import append_line, append_text, json_line

Write = Callable[[bool], object]  # its argument says whether an earlier write has failed

LIMIT_BYTES = 8 << 20  # memory for pending writes; beyond it the oldest ones are dropped
ENTRY_BYTES = 200  # memory for one write besides its text
FIRST_TRY_S = 1.0  # a caller waits at most this long for its write, and not at all while the file system hangs
HANGS_S = 10.0  # a write that takes longer is reported
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 2.0  # between two tries, doubled after each
CLOSE_S = 5.0  # the longest wait for a file system that does not respond when the process ends


@dataclass(frozen=True)
class Outage:
    """Describes a period, now over, in which writes failed or hung: its length, and the last failure."""

    seconds: float
    failure: str


class FileWriter:
    """Makes the writes of one log. Any thread may use it.

    Args:
        name: the name of the log, for the messages about an outage.
        limit_bytes: the memory for writes that are pending.
    """

    def __init__(self, name: str, limit_bytes: int = LIMIT_BYTES) -> None:
        self._name = name
        self._limit = limit_bytes
        self._changed = threading.Condition()
        self._files: dict[Path, deque[tuple[Write, int]]] = {}  # pending writes with their sizes, oldest first
        self._bytes = 0  # the total size of the pending writes
        self._pending = 0  # the number of pending writes
        self._lost = 0
        self._due = False  # whether to try now
        self._started = 0  # the number of tries, over all files
        self._finished = 0
        self._writing_since: float | None = None  # time.monotonic() at which the current write began
        self._hangs = False
        self._failing = False
        self._reported = False
        self._outage_began: float | None = None  # seconds since 1970
        self._outage_failure = ""
        self._thread: threading.Thread | None = None
        self.on_outage: Callable[[Outage], object] | None = (
            None  # called in the thread of the writes when an outage is over
        )

    def append(self, path: Path, value: dict[str, Any], wait: bool = True) -> None:
        """Appends one JSON object as a line to ``path``, in a separate line after a write that was cut short.

        Args:
            wait: as for ``put``.
        """
        text = json_line(value)

        def write(again: bool) -> None:
            append = partial(append_line, path, value) if again else partial(append_text, path, text)
            try:
                append()
            except FileNotFoundError:  # a purge may have removed the empty folder; the run directory stays removed
                with suppress(OSError):
                    path.parent.mkdir()
                append()

        self.put(path, write, len(text), wait)

    def put(self, path: Path, write: Write, size: int = 0, wait: bool = True) -> None:
        """Makes ``write``, which may raise OSError, after the earlier writes of ``path``.

        Args:
            write: must be repeatable after an OSError.
            size: the bytes of memory that it holds.
            wait: try it now; return when it was tried, at the latest after ``FIRST_TRY_S``.
        """
        with self._changed:
            self._files.setdefault(path, deque()).append((write, size + ENTRY_BYTES))
            self._bytes += size + ENTRY_BYTES
            self._pending += 1
            while self._bytes > self._limit and self._pending > 1:  # the one that is being written is not dropped
                self._forget(max(self._files.values(), key=len).popleft()[1])
                self._lost += 1
            self._due = self._due or wait or not self._failing
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"write {self._name}", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            tried = self._started + 1
            if wait and not self._hangs and not self._changed.wait_for(lambda: self._finished >= tried, FIRST_TRY_S):
                self._hangs = True
            if self._writing_since is not None and time.monotonic() - self._writing_since > HANGS_S:
                self._report_outage(f"the file system has not responded for {HANGS_S:.0f} s", HANGS_S)

    def close(self, seconds: float = CLOSE_S) -> bool:
        """Waits at most ``seconds`` for the pending writes; returns whether all have succeeded.

        The thread continues with those that remain while the process lives.
        """
        until = time.monotonic() + seconds
        with self._changed:
            while not self._is_done() and time.monotonic() < until:
                self._due = True
                self._changed.notify_all()
                self._changed.wait_for(self._is_done, FIRST_PAUSE_S)
            if self._pending:
                _print(f"{self._pending} writes of {self._name} are lost")
            return self._pending == 0

    def _is_done(self) -> bool:
        return self._pending == 0 and self._outage_began is None

    @property
    def pending(self) -> int:
        """Returns the number of writes that have not succeeded."""
        return self._pending

    def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due, pause if self._failing else None)
                self._due = False
                self._started += 1
                paths = list(self._files)
            failed = [path for path in paths if not self._write_file(path)]
            pause = min(2 * pause, LONGEST_PAUSE_S) if failed else FIRST_PAUSE_S
            with self._changed:
                self._finished = self._started
                self._hangs = False
                self._failing = bool(failed)
                self._changed.notify_all()
            if not failed and self._outage_began is not None:
                if self.on_outage is not None:  # without the lock, because it usually writes
                    self.on_outage(Outage(time.monotonic() - self._outage_began, self._outage_failure))
                with self._changed:
                    self._outage_began = None
                    self._changed.notify_all()
            with self._changed:
                if self._pending == 0:
                    if self._reported:
                        self._reported = False
                        lost = f" except for the oldest {self._lost} writes, which are lost" if self._lost else ""
                        _print(f"{self._name} can be written again; what was kept in memory is written{lost}")
                        self._lost = 0
                    if not self._due:  # the next write starts a thread again
                        self._thread = None
                        return

    def _write_file(self, path: Path) -> bool:
        """Makes the writes of ``path`` in their order; returns False at one that is to be repeated."""
        while True:
            with self._changed:
                if not self._files[path]:
                    del self._files[path]
                    return True
                began = time.monotonic()
                self._writing_since = began
                write, size = self._files[path].popleft()
            try:
                write(self._failing or self._hangs)
            except OSError as error:
                with self._changed:
                    self._failing = True
                    self._report_outage(str(error))
                    self._writing_since = None
                    self._files[path].appendleft((write, size))
                    return False
            except Exception as error:  # it would fail again, and the thread must live
                _print(f"cannot write {path}: {error!r}")
            with self._changed:
                self._writing_since = None
                seconds = time.monotonic() - began
                if seconds > HANGS_S:
                    self._report_outage(f"the file system did not respond for {seconds:.0f} s", seconds)
                self._forget(size)
                self._changed.notify_all()

    def _forget(self, size: int) -> None:
        self._bytes -= size
        self._pending -= 1

    def _report_outage(self, failure: str, since_s: float = 0.0) -> None:
        self._outage_began = self._outage_began or time.monotonic() - since_s
        self._outage_failure = failure
        if not self._reported:
            self._reported = True
            _print(f"cannot write {self._name}; it is kept in memory until it can be written: {failure}")


def _print(text: str) -> None:
    with suppress(OSError, ValueError):  # stderr is closed
        print(text, file=sys.stderr, flush=True)
