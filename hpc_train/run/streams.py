"""Keeps closed standard streams, streams of a closed terminal and ASCII-only streams from ending a process.

The streams also show control characters in the output instead of sending them to the terminal (``escape_controls``).

A daemon or ``>&-`` starts a process with closed standard streams. The next files that it opens then get the numbers 0
to 2, and its children write their output into them. An ASCII-only stream raises UnicodeEncodeError at the first other
character, and a terminal or pipe without a reader raises BrokenPipeError.
"""

from __future__ import annotations

import io
import os
import re
import select
import sys
from collections.abc import Iterable, Iterator
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


# C0 without tab and newline, DEL, C1, and the marks and overrides of the direction of text
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def escaped(text: str) -> str:
    """Returns ``text`` with control characters replaced with their Python escapes: a bell becomes ``\\x07``."""
    return CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class _EscapingStream:
    """Writes text as ``escaped`` returns it, except the carriage return before a line of progress.

    Attributes:
        unescaped: the wrapped stream, for colors and cursor movements.
    """

    def __init__(self, stream: TextIO) -> None:
        self.unescaped = stream

    def write(self, text: str) -> int:
        begin = "\r" if text.startswith("\r") else ""
        self.unescaped.write(begin + escaped(text[len(begin) :]))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.unescaped.writelines(map(escaped, lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unescaped, name)


def escape_controls() -> None:
    """Makes stdout and stderr show control characters, which directories, events and logs of any user may contain.

    With them, another user could hide text, change the title of the terminal, or forge output. Tables and colors are
    printed with ``telemetry.terminal.Terminal``, which escapes the text in them.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, _EscapingStream):
            setattr(sys, name, _EscapingStream(stream))


def unescaped(stream: TextIO) -> TextIO:
    """Returns the stream that accepts colors and cursor movements, which ``stream`` itself may escape."""
    plain: TextIO = getattr(stream, "unescaped", stream)
    return plain


class _NonFailingStream:
    """Wraps a stream so that writes and flushes never raise OSError, nor ValueError because the stream was closed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def unescaped(self) -> Any:
        return _NonFailingStream(unescaped(self._stream))

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):
            _send_nowhere(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            _send_nowhere(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _send_nowhere(stream: TextIO) -> None:
    """Redirects a stream to the null device, which discards its buffered output: writing it at exit would fail."""
    with suppress(ValueError):  # it no longer has a descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def reader_is_gone(stream: TextIO) -> bool:
    """Returns whether ``stream`` is a pipe whose reader has exited, as in ``… | head``."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def flush_output() -> None:
    """Writes the buffered output of stdout and stderr; discards it if the reader has exited."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            _send_nowhere(stream)


@contextmanager
def stdout_for_results() -> Iterator[TextIO]:
    """Yields a stream to standard output; redirects the output of this process and its children to standard error."""
    sys.stdout.flush()
    descriptor = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(os.dup(descriptor), "w", encoding="utf-8") as results, redirect_stdout(sys.stderr):
        try:
            yield results
        finally:
            os.dup2(descriptor, 1)
            os.close(descriptor)


@contextmanager
def nonfailing_streams() -> Iterator[None]:
    """Makes stdout and stderr non-failing streams inside the ``with`` block."""
    open_closed_streams()
    replace_unencodable()
    before = sys.stdout, sys.stderr
    sys.stdout = _NonFailingStream(sys.stdout)  # type: ignore[assignment]
    sys.stderr = _NonFailingStream(sys.stderr)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
