"""``python -m hpc_train bench collectives`` measures the bandwidth of collectives and checks their results.

It runs on one node, or on the nodes of a Slurm step with one task per node, and reports a table, CSV or a plot.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_train.bench.measuring import bench_parser, check_here, config_of, run_benchmark
from hpc_train.bench.request import CollectivesRequest
from hpc_train.config.schema import BatchConfig, Config, StrategyConfig
from hpc_train.errors import UserError
from hpc_train.machine.allocation import current_allocation, workers_per_node
from hpc_train.report.plots import check_plot
from hpc_train.run.exits import Exit
from hpc_train.units import counted

ENTRY = "hpc_train.bench.worker:measure_collectives"
SIZES = ("1K-16M", "1K-1G")  # default sizes without and with GPUs
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_STEP = 4  # ratio of consecutive sizes in a range
SECONDS = 0.2  # duration of one operation at one size
ALGORITHMS = ("Ring", "Tree", "NVLS", "NVLSTree")  # of NCCL's all-reduce, as NCCL_ALGO names them
CLOSE = 1.05  # times as fast: less does not show in two measurements

COLUMNS = ("group", "ranks", "operation", "bytes", "repeats", "seconds", "algorithm_gb_per_s", "bus_gb_per_s", "wrong")


def main(arguments: list[str]) -> int:
    options, rest = _parser().parse_known_args(arguments)
    sizes = None if options.sizes is None else parse_sizes(options.sizes)
    if options.plot is not None:
        check_plot(options.plot, "--plot")
    config = config_of(rest, several_nodes=True)
    gpus, workers = workers_per_node(config.cluster)
    if config.strategy.name == "single":  # no strategy is given
        ranks = current_allocation().nodes * workers
        replicas = StrategyConfig(name="dp", dp="fill")
        config = replace(config, strategy=replicas, batch=BatchConfig(global_size=ranks))
    if check_here(config).world_size == 1:
        raise UserError(
            "bench collectives needs at least 2 ranks, got 1",
            where="cluster",
            fix="cluster.cpu_workers=4, or more GPUs",
        )
    request = CollectivesRequest(sizes or parse_sizes(SIZES[gpus > 0]), SECONDS)
    if options.algorithms:
        check_algorithms(gpus)
        code, result = run_algorithms(config, replace(request, operations=("all_reduce",)))
    else:
        code, result = run_benchmark(config, request, ENTRY)
    if result is not None:
        if options.json:
            print(json.dumps(result))
        else:
            print(collectives_report(result))
            if options.algorithms:
                print(algorithms_report(result))
        if options.csv is not None:
            with options.csv.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, COLUMNS)
                writer.writeheader()
                writer.writerows(result["rates"])
        if options.plot is not None:
            write_plot(result, options.plot)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser(
        "collectives",
        "[overrides] [--sizes SIZES] [--algorithms] [--csv FILE] [--plot FILE]",
        "Times all-reduce, reduce-scatter, all-gather, all-to-all, broadcast and send/recv over all ranks and along the"
        " axes of the strategy, and checks the results.",
        [
            "python -m hpc_train bench collectives",
            "python -m hpc_train bench collectives +strategy=hybrid --sizes 1M,64M --csv rates.csv --plot rates.png",
            "python -m hpc_train bench collectives +strategy=dp model=moe_tiny strategy.ep=2",
            "srun --nodes=4 --ntasks-per-node=1 python -m hpc_train bench collectives cluster.nodes=4",
        ],
    )
    parser.add_argument("--sizes", help=f"4K,1M or 1K-64M in powers of 4 (default: {SIZES[0]}, with GPUs {SIZES[1]})")
    parser.add_argument(
        "--algorithms", action="store_true", help="only all-reduce, once with each NCCL_ALGO and as NCCL chooses"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot bus bandwidth over size (needs matplotlib)")
    return parser


def check_algorithms(gpus: int) -> None:
    """Raises UserError if a choice of NCCL's algorithm has no effect or is already made."""
    if gpus == 0:
        raise UserError(
            "--algorithms compares algorithms of NCCL, but ranks on CPUs use gloo, which has one for each operation",
            where="--algorithms",
            fix="run it on nodes with GPUs, or omit --algorithms",
        )
    if "NCCL_ALGO" in os.environ:
        raise UserError(
            f"NCCL_ALGO={os.environ['NCCL_ALGO']} is set, so NCCL does not choose",
            where="the environment",
            fix="unset NCCL_ALGO",
        )


def run_algorithms(config: Config, request: CollectivesRequest) -> tuple[int, dict[str, Any] | None]:
    """Measures as NCCL chooses, then with each algorithm. ``algorithms`` of the result has the rates by the name of the
    algorithm, and None for one that NCCL refuses on these GPUs."""
    config = replace(config, elastic=replace(config.elastic, max_restarts=0))  # NCCL refuses each time
    code, result = run_benchmark(config, request, ENTRY)
    if code != Exit.DONE:
        return code, None
    rates: dict[str, Any] = {}
    for name in ALGORITHMS:
        os.environ["NCCL_ALGO"] = name
        try:
            code, forced = run_benchmark(config, request, ENTRY, failures=[], part=f"-{name}")
        finally:
            del os.environ["NCCL_ALGO"]
        if code == Exit.STOPPED:
            return code, None
        rates[name] = None if forced is None else forced["rates"]
    return Exit.DONE, None if result is None else {**result, "algorithms": rates}  # None on all nodes but the first


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parses sizes in bytes such as ``4K,1M``, or a range ``1K-1G`` (times 4 each). Raises UserError if ``text`` is
    neither."""
    invalid = UserError(
        f"{text!r} is not a size", where="--sizes", fix="give a list like 4K,1M,64M or a range like 1K-64M"
    )
    bounds = text.split("-", 1)
    sizes = []
    for word in bounds if len(bounds) == 2 else text.split(","):
        match = re.fullmatch(r"(\d+)([KMG]?)", word.strip().upper().removesuffix("B"))
        if match is None or int(match[1]) == 0:
            raise invalid
        sizes.append(int(match[1]) * _UNITS[match[2]])
    if len(bounds) == 2:
        size, most = sizes
        sizes = []
        while size <= most:
            sizes.append(size)
            size *= _STEP
    if not sizes:
        raise invalid
    return tuple(sizes)


def size_text(size: int) -> str:
    """Formats a size: ``1048576`` as ``1M``."""
    unit = next(name for name in ("G", "M", "K", "") if size % _UNITS[name] == 0)
    return f"{size // _UNITS[unit]}{unit}"


def collectives_report(result: dict[str, Any]) -> str:
    lines = [
        f"{_title(result)}, float32, torch {result['torch']}",
        "algbw = bytes / time, busbw as in nccl-tests; times of the slowest rank",
        f"{'group':<21}{'operation':<16}{'size':>7}{'time/us':>12}{'algbw GB/s':>12}{'busbw GB/s':>12}{'wrong':>8}",
    ]
    for row in result["rates"]:
        group = f"{row['group']} ({row['ranks']})"
        lines.append(
            f"{group:<21}{row['operation']:<16}{size_text(row['bytes']):>7}{1e6 * row['seconds']:>12,.1f}"
            f"{row['algorithm_gb_per_s']:>12.4g}{row['bus_gb_per_s']:>12.4g}{row['wrong']:>8}"
        )
    if result["expected"] is None:
        lines.append("expected: unknown, because the link rates of this fabric are unknown")
    else:
        best = max(row["bus_gb_per_s"] for row in result["rates"] if row["group"] == "world")
        bus = result["expected"]["bus_gb_per_s"]
        reason = result["expected"]["reason"]
        lines.append(f"expected: busbw {bus:.1f} GB/s ({reason}); the best is {best / bus:.0%} of it")
    return "\n".join(lines)


def algorithms_report(result: dict[str, Any]) -> str:
    """Formats the bus bandwidth of all-reduce by algorithm, and where one is faster than NCCL's choice."""
    names = [name for name, rates in result["algorithms"].items() if rates is not None]
    lines = [
        "all_reduce by NCCL_ALGO, busbw GB/s:",
        f"{'group':<14}{'size':>7}{'NCCL chooses':>14}" + "".join(f"{name:>10}" for name in names) + "  fastest",
    ]
    faster = []
    for index, row in enumerate(result["rates"]):
        forced = {name: result["algorithms"][name][index]["bus_gb_per_s"] for name in names}
        chosen = row["bus_gb_per_s"]
        best = max(forced, key=forced.__getitem__, default=None)
        if best is None or forced[best] <= CLOSE * chosen:
            fastest = "NCCL's choice"
        else:
            fastest = f"{best}, {forced[best] / chosen:.2f} times"
            faster.append(f"{best} at {size_text(row['bytes'])} in {row['group']}")
        group = f"{row['group']} ({row['ranks']})"
        cells = "".join(f"{rate:>10.4g}" for rate in forced.values())
        lines.append(f"{group:<14}{size_text(row['bytes']):>7}{chosen:>14.4g}{cells}  {fastest}")
    refused = [name for name, rates in result["algorithms"].items() if rates is None]
    if refused:
        lines.append(f"NCCL refuses {', '.join(refused)} on these GPUs")
    if faster:
        lines.append(
            f"faster than NCCL's choice by more than 5 %: {'; '.join(faster)}. NCCL_ALGO applies to all sizes: compare"
            " the steps of a training before you set +cluster.env.NCCL_ALGO"
        )
    else:
        lines.append("NCCL's choice is at most 5 % slower than the fastest: leave NCCL_ALGO unset")
    return "\n".join(lines)


def _title(result: dict[str, Any]) -> str:
    nodes = counted(result["nodes"], "node", "nodes")
    return f"{result['world_size']} x {result['device']} on {nodes}, {result['backend']}"


def write_plot(result: dict[str, Any], path: Path) -> None:
    """Plots the bus bandwidth over the size for the group of all ranks, with one line per operation and one for the
    expected value.
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
    axes.set_title(_title(result))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
