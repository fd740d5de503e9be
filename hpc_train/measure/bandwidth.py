"""Bandwidths of collectives as the tables of nccl-tests define them, and sizes as a person writes them. No torch.

With S bytes in t seconds over n ranks the algorithm bandwidth is S / t. The bus bandwidth is that times a factor, the
share of S that has to cross the slowest link at least, so that it can be compared with the link's rate whatever n is
(nccl-tests, doc/PERFORMANCE.md). Of an all-gather and a reduce-scatter, S is the size of the whole and not of one
rank's part.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from hpc_train.config.errors import ConfigError

FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "send_recv": lambda n: 1.0,  # each rank sends to the next one, all at once
}
OPERATIONS = tuple(FACTORS)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_STEP = 4  # from one size of a range to the next


@dataclass(frozen=True)
class Rate:
    """One measurement: ``seconds`` is the mean of ``repeats`` on the slowest rank; ``wrong`` counts wrong elements."""

    operation: str
    ranks: int
    bytes: int
    seconds: float
    repeats: int
    wrong: int

    @property
    def algorithm(self) -> float:
        """Algorithm bandwidth in bytes/s."""
        return self.bytes / self.seconds

    @property
    def bus(self) -> float:
        """Bus bandwidth in bytes/s."""
        return self.algorithm * FACTORS[self.operation](self.ranks)


def parse_sizes(text: str) -> tuple[int, ...]:
    """Bytes from ``4K,1M`` or ``1K-1G`` (times 4 each).

    Raises:
        ConfigError: it is neither.
    """
    first, dash, last = text.partition("-")
    if not dash:
        return tuple(_size(word) for word in text.split(","))
    size, most = _size(first), _size(last)
    sizes = []
    while size <= most:
        sizes.append(size)
        size *= _STEP
    if not sizes:
        raise _no_size(text)
    return tuple(sizes)


def size_text(size: int) -> str:
    """``1048576`` as ``1M``."""
    unit = next(name for name in ("G", "M", "K", "") if size % _UNITS[name] == 0)
    return f"{size // _UNITS[unit]}{unit}"


def _size(word: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG]?)", word.strip().upper().removesuffix("B"))
    if found is None or int(found[1]) == 0:
        raise _no_size(word)
    return int(found[1]) * _UNITS[found[2]]


def _no_size(word: str) -> ConfigError:
    return ConfigError(f"{word!r} is no size", where="--sizes", mend="4K,1M,64M or a range, 1K-64M")
