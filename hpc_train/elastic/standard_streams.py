"""The agent's own output goes nowhere when nobody reads it any more (a closed terminal, a launcher that was killed).

Else the first word about a failure would raise BrokenPipeError, in the thread that is about to restart the workers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


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
def unbroken_streams() -> Iterator[None]:
    """Inside the ``with`` block, stdout and stderr are such streams."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Unbroken(sys.stdout), _Unbroken(sys.stderr)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
