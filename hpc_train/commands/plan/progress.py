"""Shows on a terminal how far a plan is."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from hpc_train.run.streams import unescaped


def shown(counts: Iterable[int]) -> Iterator[int]:
    """Yields numbers of GPUs; a terminal shows which one is compared, and nothing of it afterwards."""
    if not sys.stderr.isatty():
        yield from counts
        return
    for count in counts:
        print(f"\rcomparing layouts on {count:,} GPUs ", end="", file=sys.stderr, flush=True)
        yield count
    print("\r\x1b[K", end="", file=unescaped(sys.stderr), flush=True)
