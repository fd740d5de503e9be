"""``python -m hpc_train bench collectives`` measures the bandwidth of collectives and checks their results.

It runs on one node, or on the nodes of a Slurm step with one task per node, and reports a table, CSV or a plot.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_train.bench.measuring import check_here, config_of, run_benchmark
from hpc_train.bench.request import CollectivesRequest
from hpc_train.config.schema import BatchConfig, Config, StrategyConfig
from hpc_train.errors import UserError
from hpc_train.machine.allocation import current_allocation, workers_per_node
from hpc_train.report.plots import check_plot

ENTRY = "hpc_train.bench.collectives_worker:measure_all"
SIZES = ("1K-16M", "1K-1G")  # default sizes without and with GPUs
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_STEP = 4  # ratio of consecutive sizes in a range
SECONDS = 0.2  # duration of one operation at one size

_EPILOG = """\
examples:
  python -m hpc_train bench collectives
  python -m hpc_train bench collectives +strategy=hybrid --sizes 1M,64M --csv rates.csv --plot rates.png
  srun --nodes=4 --ntasks-per-node=1 python -m hpc_train bench collectives cluster.nodes=4
"""


def main(arguments: list[str]) -> int:
    """Measures, prints the result and returns the exit code."""
    options, rest = _parser().parse_known_args(arguments)
    sizes = None if options.sizes is None else parse_sizes(options.sizes)
    if options.plot is not None:
        check_plot(options.plot, "--plot")
    config = config_of(rest, several_nodes=True)
    nodes = current_allocation().nodes
    gpus, workers = workers_per_node(config.cluster)
    config = _all_workers(config, nodes * workers)
    layout = check_here(config)
    if layout.world_size == 1:
        raise UserError(
            "bench collectives needs at least 2 ranks, got 1",
            where="cluster",
            fix="cluster.cpu_workers=4, or more GPUs",
        )
    request = CollectivesRequest(sizes or parse_sizes(SIZES[gpus > 0]), SECONDS)
    code, result = run_benchmark(config, request, ENTRY, Path(config.run.root) if nodes > 1 else None)
    if result is not None:
        print(json.dumps(result) if options.json else collectives_report(result))
        if options.csv is not None:
            write_csv(result, options.csv)
        if options.plot is not None:
            write_plot(result, options.plot)
    return code


def _all_workers(config: Config, workers: int) -> Config:
    """Makes all workers replicas if no strategy is given."""
    if config.strategy.name != "single":
        return config
    return replace(config, strategy=StrategyConfig(name="dp", dp="fill"), batch=BatchConfig(global_size=workers))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hpc_train bench collectives",
        usage="python -m hpc_train bench collectives [overrides] [--sizes SIZES] [--csv FILE] [--plot FILE] [--json]",
        description="Times all-reduce, reduce-scatter, all-gather, broadcast and send/recv over all ranks and along the"
        " axes of the strategy, and checks the results. It takes the same overrides as a training.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--sizes", help=f"4K,1M or 1K-64M in powers of 4 (default: {SIZES[0]}, with GPUs {SIZES[1]})")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot bus bandwidth over size (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parses sizes in bytes such as ``4K,1M``, or a range ``1K-1G`` (times 4 each).

    Raises:
        UserError: ``text`` is neither.
    """
    first, dash, last = text.partition("-")
    if not dash:
        return tuple(_size(word) for word in text.split(","))
    size = _size(first)
    most = _size(last)
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
    match = re.fullmatch(r"(\d+)([KMG]?)", word.strip().upper().removesuffix("B"))
    if match is None or int(match[1]) == 0:
        raise _invalid_size(word)
    return int(match[1]) * _UNITS[match[2]]


def _invalid_size(word: str) -> UserError:
    return UserError(
        f"{word!r} is not a size", where="--sizes", fix="give a list like 4K,1M,64M or a range like 1K-64M"
    )


COLUMNS = ("group", "ranks", "operation", "bytes", "repeats", "seconds", "algorithm_gb_per_s", "bus_gb_per_s", "wrong")


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
    if result["nodes"] == 1:
        return "1 node"
    return f"{result['nodes']} nodes"


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


def write_plot(result: dict[str, Any], path: Path) -> None:
    """Plots the bus bandwidth over the size for the group of all ranks, with a line per operation and the expected
    value.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    rows = [row for row in result["rates"] if row["group"] == "world"]
    for operation in dict.fromkeys(row["operation"] for row in rows):
        selected = [row for row in rows if row["operation"] == operation]
        axes.plot(
            [row["bytes"] for row in selected], [row["bus_gb_per_s"] for row in selected], marker="o", label=operation
        )
    if result["expected"] is not None:
        axes.axhline(result["expected"]["bus_gb_per_s"], linestyle="--", color="gray", label="expected (all_reduce)")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes")
    axes.set_ylabel("bus bandwidth, GB/s")
    axes.set_title(f"{result['world_size']} x {result['device']} on {_nodes(result)}, {result['backend']}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
