"""Finds the level of a line of the workers' output in the forms that Python, torch and NCCL use.

A line of unknown form counts as info. Indented lines belong to the line before them, and the line with the exception
to its traceback.
"""

from __future__ import annotations

import re
from enum import IntEnum


class Level(IntEnum):
    """Names the severity of a line."""

    info = 0
    warning = 1
    error = 2


_RANK = r"^(?:\[rank\d+\]:\s?)?"  # torch puts it before what it prints on a failure
# the first that matches counts
_FORMS = (
    (Level.error, rf"{_RANK}Traceback \(most recent call last\):"),
    (Level.error, rf"{_RANK}\[?[EF]\d{{4}} \d\d:\d\d:\d\d"),  # glog, which torch's C++ code uses: [W1123 13:55:27.1
    (Level.warning, rf"{_RANK}\[?W\d{{4}} \d\d:\d\d:\d\d"),
    (Level.error, r"(?:^|[\[|:\s-])(?:ERROR|CRITICAL|FATAL)(?:[\]|:\s-]|$)"),  # Python's logging
    (Level.warning, r"(?:^|[\[|:\s-])WARN(?:ING)?(?:[\]|:\s-]|$)"),  # also NCCL WARN
    (Level.warning, r":\d+: \w*Warning: |^(?:\w+\.)*\w*Warning: "),  # Python's warnings
    (Level.error, rf"{_RANK}(?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?:: |$)"),
    (Level.error, r"^(?:Fatal Python error|Segmentation fault|Killed\b)"),
    (Level.warning, r"^warning\b|^skipped .*non-finite|^rolled back to step|^the last save, .* failed"),  # hpc_train's
)
_PATTERNS = tuple((level, re.compile(pattern)) for level, pattern in _FORMS)
_HEADER = re.compile(_FORMS[0][1])
_INDENTED = re.compile(rf"{_RANK}\s+\S")
_CHAINED = re.compile(rf"{_RANK}(?:$|During handling of the above|The above exception was)")


class Levels:
    """Tells the level of each line of one rank, which are given in order."""

    def __init__(self) -> None:
        self._level = Level.info
        self._in_traceback = False

    def of(self, text: str) -> Level:
        """Returns the level of the next line; ``text`` is the line without its time and rank."""
        if _INDENTED.search(text) or (self._level is Level.error and _CHAINED.search(text)):
            return self._level
        ends_traceback = self._in_traceback and not _HEADER.search(text)
        self._in_traceback = _HEADER.search(text) is not None
        self._level = next((level for level, pattern in _PATTERNS if pattern.search(text)), Level.info)
        if ends_traceback:
            self._level = Level.error
        return self._level
