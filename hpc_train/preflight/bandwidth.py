"""Bandwidths of collectives as the tables of nccl-tests define them, and sizes as a person writes them. No torch.

With S bytes in t seconds over n ranks the algorithm bandwidth is S / t. The bus bandwidth is that times a factor, the
share of S that has to cross the slowest link at least, so that it can be compared with the link's rate whatever n is
(nccl-tests, doc/PERFORMANCE.md). Of an all-gather and a reduce-scatter, S is the size of the whole and not of one
rank's part.

The result of ``bench collectives`` as a table, as CSV and as a plot. No torch; matplotlib only for the plot.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.errors import UserError

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
        UserError: it is neither.
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


def _no_size(word: str) -> UserError:
    return UserError(f"{word!r} is no size", where="--sizes", fix="4K,1M,64M or a range, 1K-64M")


COLUMNS = ("group", "ranks", "operation", "bytes", "repeats", "seconds", "algorithm_gb_per_s", "bus_gb_per_s", "wrong")
PLOTS = (".png", ".pdf", ".svg")


def collectives_report(result: dict[str, Any]) -> str:
    """A line for each operation and size."""
    lines = [
        f"{result['world_size']} x {result['device']} on {_nodes(result)}, {result['backend']}, float32, "
        f"torch {result['torch']}",
        "algbw = bytes / time, busbw as in nccl-tests; the time is the slowest rank's",
        f"{'group':<14}{'operation':<16}{'size':>7}{'time/us':>12}{'algbw GB/s':>12}{'busbw GB/s':>12}{'wrong':>8}",
    ]
    for row in result["rates"]:
        group = f"{row['group']} ({row['ranks']})"
        lines.append(
            f"{group:<14}{row['operation']:<16}{size_text(row['bytes']):>7}{1e6 * row['seconds']:>12,.1f}"
            f"{row['algorithm_gb_per_s']:>12.4g}{row['bus_gb_per_s']:>12.4g}{row['wrong']:>8}"
        )
    lines.append(_expected(result))
    return "\n".join(lines)


def _nodes(result: dict[str, Any]) -> str:
    return "1 node" if result["nodes"] == 1 else f"{result['nodes']} nodes"


def _expected(result: dict[str, Any]) -> str:
    expected = result["expected"]
    if expected is None:
        return "expected: not known, the rates of this fabric's links are not known"
    best = max(row["bus_gb_per_s"] for row in result["rates"] if row["group"] == "world")
    bus = expected["bus_gb_per_s"]
    return f"expected: busbw {bus:.1f} GB/s ({expected['reason']}); the best is {best / bus:.0%} of it"


def write_csv(result: dict[str, Any], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(result["rates"])


def check_plot(path: Path) -> None:
    """Before anything is measured.

    Raises:
        UserError: matplotlib is not installed, or does not write such files.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UserError(
            "matplotlib draws the plot, and it is not installed",
            where="--plot",
            fix="pip install 'hpc_train[plots]', or --csv FILE instead",
        ) from error
    if path.suffix not in PLOTS:
        raise UserError(f"{path} is no picture", where="--plot", fix=f"a file that ends in {', '.join(PLOTS)}")


def write_plot(result: dict[str, Any], path: Path) -> None:
    """Bus bandwidth over size of the group of all ranks, a line for each operation, and the expected one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    rows = [row for row in result["rates"] if row["group"] == "world"]
    for operation in dict.fromkeys(row["operation"] for row in rows):
        own = [row for row in rows if row["operation"] == operation]
        axes.plot([row["bytes"] for row in own], [row["bus_gb_per_s"] for row in own], marker="o", label=operation)
    if result["expected"] is not None:
        axes.axhline(result["expected"]["bus_gb_per_s"], linestyle="--", color="grey", label="expected (all_reduce)")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes")
    axes.set_ylabel("bus bandwidth, GB/s")
    axes.set_title(f"{result['world_size']} x {result['device']} on {_nodes(result)}, {result['backend']}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
