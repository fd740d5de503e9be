"""Slurm's short form of node names: ``n[1-3,07],login`` are n1, n2, n3, n07 and login."""

from __future__ import annotations

import itertools
import re

_ITEM = re.compile(r"(?:[^,\[]+|\[[^\]]*\])+")
_PART = re.compile(r"\[([^\]]*)\]|([^\[]+)")


def expand(text: str) -> list[str]:
    """The names, in their order; as ``scontrol show hostnames`` has them, which is not there in a container."""
    return [name for item in _ITEM.findall(text) for name in _names(item)]


def _names(item: str) -> list[str]:
    parts = [_numbers(inside) if inside else [plain] for inside, plain in _PART.findall(item)]
    return ["".join(pieces) for pieces in itertools.product(*parts)]


def _numbers(ranges: str) -> list[str]:
    found = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        found += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return found
