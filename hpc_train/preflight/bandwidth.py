"""Collective bandwidths as defined by nccl-tests, and the report of ``bench collectives`` as table, CSV and plot. No
torch.

With S bytes in t seconds over n ranks the algorithm bandwidth is S / t. The bus bandwidth is that times a factor, the
share of S that must cross the slowest link, so that it is comparable with the link's rate for any n (nccl-tests,
doc/PERFORMANCE.md). For an all-gather and a reduce-scatter, S is the size of the whole buffer, not of one rank's part.
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
    "send_recv": lambda n: 1.0,  # all ranks send to the next rank at once
}
OPERATIONS = tuple(FACTORS)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_STEP = 4  # ratio of consecutive sizes in a range


@dataclass(frozen=True)
class Rate:
    """One measurement. ``seconds`` is the mean of ``repeats`` on the slowest rank; ``wrong`` counts wrong elements."""

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
    """Parses sizes in bytes such as ``4K,1M``, or a range ``1K-1G`` (times 4 each).

    Raises:
        UserError: ``text`` is neither.
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
        raise _invalid_size(text)
    return tuple(sizes)


def size_text(size: int) -> str:
    """Formats a size: ``1048576`` as ``1M``."""
    unit = next(name for name in ("G", "M", "K", "") if size % _UNITS[name] == 0)
    return f"{size // _UNITS[unit]}{unit}"


def _size(word: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG]?)", word.strip().upper().removesuffix("B"))
    if found is None or int(found[1]) == 0:
        raise _invalid_size(word)
    return int(found[1]) * _UNITS[found[2]]


def _invalid_size(word: str) -> UserError:
    return UserError(
        f"{word!r} is not a size", where="--sizes", fix="give a list like 4K,1M,64M or a range like 1K-64M"
    )


COLUMNS = ("group", "ranks", "operation", "bytes", "repeats", "seconds", "algorithm_gb_per_s", "bus_gb_per_s", "wrong")
PLOTS = (".png", ".pdf", ".svg")


def collectives_report(result: dict[str, Any]) -> str:
    """Formats the result with a line per operation and size."""
    lines = [
        f"{result['world_size']} x {result['device']} on {_nodes(result)}, {result['backend']}, float32, "
        f"torch {result['torch']}",
        "algbw = bytes / time, busbw as in nccl-tests; times are those of the slowest rank",
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
        return "expected: unknown, because the link rates of this fabric are unknown"
    best = max(row["bus_gb_per_s"] for row in result["rates"] if row["group"] == "world")
    bus = expected["bus_gb_per_s"]
    return f"expected: busbw {bus:.1f} GB/s ({expected['reason']}); the best is {best / bus:.0%} of it"


def write_csv(result: dict[str, Any], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(result["rates"])


def check_plot(path: Path) -> None:
    """Checks that a plot can be written, before anything is measured.

    Raises:
        UserError: matplotlib is not installed, or does not support the file type.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UserError(
            "plotting requires matplotlib, which is not installed",
            where="--plot",
            fix="pip install 'hpc_train[plots]', or use --csv FILE instead",
        ) from error
    if path.suffix not in PLOTS:
        raise UserError(
            f"{path} is not an image file", where="--plot", fix=f"use a file name that ends in {', '.join(PLOTS)}"
        )


def write_plot(result: dict[str, Any], path: Path) -> None:
    """Plots the bus bandwidth over the size for the group of all ranks, with a line per operation and the expected
    value.
    """
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
