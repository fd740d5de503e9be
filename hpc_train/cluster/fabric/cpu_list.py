"""Lists of CPUs and of NUMA nodes as the kernel writes them: ``0-51,104-155``."""

from __future__ import annotations

import re
from collections.abc import Iterable

LIMIT = 1 << 16  # more than any kernel is built for; a typo is not to become a list of billions
_PART = re.compile(r"(\d+)(?:-(\d+))?")


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """The numbers of a list, ascending; () for an empty one.

    Raises:
        ValueError: not such a list.
    """
    numbers: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a list of CPUs like 0-3,8")
        first = int(match[1])
        last = int(match[2] or first)
        if not first <= last < LIMIT:
            raise ValueError(f"{part!r} is not a range of CPUs")
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def format_cpu_list(cpus: Iterable[int]) -> str:
    """The shortest list of ``cpus``: 0, 1, 2, 5 is ``0-2,5``."""
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs(cpus))


def runs(cpus: Iterable[int]) -> list[list[int]]:
    """``cpus`` in ascending order, cut where a number is missing."""
    found: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if found and found[-1][-1] == cpu - 1:
            found[-1].append(cpu)
        else:
            found.append([cpu])
    return found
