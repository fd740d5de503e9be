"""Shortens tracebacks to the frames of the user's code, without the frames of hpc_train, torch and other libraries."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain, groupby
from pathlib import Path

from hpc_train.units import counted

FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>.+)')
STACK = "(most recent call first)"  # the heading of the stack of a live process, not of an exception
PACKAGE = f"{Path(__file__).parent.parent}/"
LIBRARY = re.compile(r"^<frozen |^<string>|/(site|dist)-packages/|/lib(64)?/python3[.\d]*/|/code/[0-9a-f]+/hpc_train/")


def own_frames(traceback: str) -> str:
    """Returns ``traceback`` with only the user's frames, each with its source lines, and the number of other frames.

    A traceback without a frame of the user is returned unchanged.
    """
    blocks = list(_blocks(traceback))
    if not any(is_users for is_users, _ in blocks):
        return traceback
    lines: list[str] = []
    for is_users, group in groupby(blocks, key=lambda block: block[0]):
        frames = [block for _, block in group]
        if is_users is False:
            lines.append(f"  [{counted(len(frames), 'frame', 'frames')} of hpc_train and libraries]")
        else:
            lines += chain.from_iterable(frames)
    return "\n".join(lines)


def own_place(traceback: str) -> str | None:
    """Returns ``net.py:14 in forward``, the innermost frame of the user's code; None without one."""
    frames = [match for line in traceback.splitlines() if (match := FRAME.match(line)) and _is_own(match["file"])]
    if not frames:
        return None
    return _place(frames[0 if STACK in traceback else -1])


def stack_place(stacks: str) -> str | None:
    """Returns the place of the main thread in the output of faulthandler: the user's innermost frame, or the innermost
    frame.
    """
    threads = re.split(r"^(?=(?:Current thread|Thread) 0x)", stacks, flags=re.MULTILINE)
    main = next((thread for thread in threads if thread.startswith("Current thread")), threads[-1])
    place = own_place(main)
    innermost = next(filter(None, map(FRAME.match, main.splitlines())), None)
    if place is None and innermost is not None:
        return _place(innermost)
    return place


def _place(frame: re.Match[str]) -> str:
    return f"{Path(frame['file']).name}:{frame['line']} in {frame['function']}"


def _is_own(file: str) -> bool:
    return not file.startswith(PACKAGE) and LIBRARY.search(file) is None


def _blocks(traceback: str) -> Iterator[tuple[bool | None, list[str]]]:
    """Yields each frame with its lines, and whether it is the user's; None for other lines, such as the message."""
    is_users: bool | None = None
    block: list[str] = []
    for line in traceback.splitlines():
        frame = FRAME.match(line)
        if is_users is not None and frame is None and line.startswith(("    ", "  [Previous line repeated")):
            block.append(line)
            continue
        if block:
            yield is_users, block
        is_users = frame and _is_own(frame["file"])
        block = [line]
    if block:
        yield is_users, block
