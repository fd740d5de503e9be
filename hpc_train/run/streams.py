"""Standard streams that never end a process: closed ones, those of a closed terminal, and those that are ASCII only.

A daemon or ``>&-`` starts a process with closed standard streams. The next files that it opens then get the numbers 0
to 2, and its children write their output into them. An ASCII-only stream raises UnicodeEncodeError at the first other
character, and a terminal or pipe that nobody reads any more raises BrokenPipeError.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, TextIO


def open_closed_streams() -> None:
    """Opens the null device in place of closed standard streams; this process's children inherit it."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number
            os.set_inheritable(opened, True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def replace_unencodable() -> None:
    """Makes stdout and stderr write a question mark for a character that their encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            with suppress(OSError):  # it was opened on a file, and its descriptor is now a pipe
                stream.reconfigure(errors="replace")


class _NonFailingStream:
    """A stream whose writes and flushes never raise OSError, nor ValueError because the stream was closed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):
            self._redirect_to_devnull()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._redirect_to_devnull()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _redirect_to_devnull(self) -> None:
        """Redirects the stream and so discards its buffered output, which would fail at the end of the process."""
        with suppress(ValueError):  # it has no descriptor any more
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


@contextmanager
def stdout_for_results() -> Iterator[TextIO]:
    """Yields a stream to standard output, and sends to standard error what this process and its children print."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(os.dup(kept), "w", encoding="utf-8") as results, redirect_stdout(sys.stderr):
        try:
            yield results
        finally:
            os.dup2(kept, 1)
            os.close(kept)


@contextmanager
def nonfailing_streams() -> Iterator[None]:
    """Makes stdout and stderr non-failing streams inside the ``with`` block."""
    open_closed_streams()
    replace_unencodable()
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _NonFailingStream(sys.stdout), _NonFailingStream(sys.stderr)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
