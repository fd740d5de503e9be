"""``python -m hpc_train bench collectives`` measures the bandwidth of collectives and checks their results.

It runs on one node, or on the nodes of a Slurm step with one task per node.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from hpc_train.bench.measuring import config_of, run_benchmark
from hpc_train.bench.request import CollectivesRequest
from hpc_train.cluster.allocation import current_allocation, workers_per_node
from hpc_train.config.schema import BatchConfig, Config, StrategyConfig
from hpc_train.errors import UserError
from hpc_train.plan.validate import validate
from hpc_train.preflight.bandwidth import check_plot, collectives_report, parse_sizes, write_csv, write_plot

ENTRY = "hpc_train.bench.collectives_worker:measure_all"
SIZES = ("1K-16M", "1K-1G")  # default sizes without and with GPUs
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
        check_plot(options.plot)
    config = config_of(rest, several_nodes=True)
    nodes = current_allocation().nodes
    gpus, workers = workers_per_node(config.cluster)
    config = _all_workers(config, nodes * workers)
    layout = validate(config, nodes, workers)
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
