"""Shortens tracebacks to the frames of the user's own code, without those of hpc_train, torch and other libraries."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from hpc_train.units import counted

FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>.+)')
STACK = "(most recent call first)"  # of a process that was looked at, not of an exception
PACKAGE = f"{Path(__file__).parent.parent}/"
LIBRARY = re.compile(r"^<frozen |^<string>|/(site|dist)-packages/|/lib(64)?/python3[.\d]*/|/code/[0-9a-f]+/hpc_train/")


def own_frames(traceback: str) -> str:
    """Returns ``traceback`` with only the own frames, each with its lines of source, and the numbers of the others.

    A traceback without an own frame stays as it is.
    """
    blocks = list(_blocks(traceback))
    if not any(own for own, _ in blocks):
        return traceback
    lines: list[str] = []
    for own, several in groupby(blocks, key=lambda block: block[0]):
        found = [block for _, block in several]
        hidden = f"  [{counted(len(found), 'frame', 'frames')} of hpc_train and libraries]"
        lines += [hidden] if own is False else [line for block in found for line in block]
    return "\n".join(lines)


def own_place(traceback: str) -> str | None:
    """Returns ``net.py:14 in forward``, the innermost own frame; None without one."""
    frames = [match for line in traceback.splitlines() if (match := FRAME.match(line)) and _is_own(match["file"])]
    if not frames:
        return None
    return _place(frames[0 if STACK in traceback else -1])


def stack_place(stacks: str) -> str | None:
    """Returns where the main thread is in the output of faulthandler: the innermost own frame, else the innermost."""
    threads = re.split(r"^(?=(?:Current thread|Thread) 0x)", stacks, flags=re.MULTILINE)
    main = next((thread for thread in threads if thread.startswith("Current thread")), threads[-1])
    frames = [match for line in main.splitlines() if (match := FRAME.match(line))]
    return own_place(main) or (_place(frames[0]) if frames else None)


def _place(frame: re.Match[str]) -> str:
    return f"{Path(frame['file']).name}:{frame['line']} in {frame['function']}"


def _is_own(file: str) -> bool:
    return not file.startswith(PACKAGE) and LIBRARY.search(file) is None


def _blocks(traceback: str) -> Iterator[tuple[bool | None, list[str]]]:
    """Yields each frame with its lines, and whether it is an own one; None for other lines, such as the message."""
    own: bool | None = None
    block: list[str] = []
    for line in traceback.splitlines():
        frame = FRAME.match(line)
        if own is not None and frame is None and line.startswith(("    ", "  [Previous line repeated")):
            block.append(line)
            continue
        if block:
            yield own, block
        own, block = (None if frame is None else _is_own(frame["file"])), [line]
    if block:
        yield own, block
