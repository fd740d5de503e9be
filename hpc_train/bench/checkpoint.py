"""``python -m hpc_train bench checkpoint`` compares saves and loads of a run's state in ``run.root`` with plain DCP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpc_train.bench.measuring import bench_parser, check_here, config_of, refuse_below_one, run_benchmark
from hpc_train.bench.request import CheckpointRequest
from hpc_train.units import format_bytes

ENTRY = "hpc_train.bench.checkpoint_worker:measure"


def main(arguments: list[str]) -> int:
    parser = bench_parser(
        "checkpoint",
        "[overrides] [--pairs N]",
        "Times saves and loads of the state in run.root, alternating with plain torch.distributed.checkpoint.",
        ["python -m hpc_train bench checkpoint +strategy=zero3 model=gpt_124m run.root=/scratch/me"],
    )
    parser.add_argument("--pairs", type=int, default=20, metavar="N", help="number of rounds (default: %(default)s)")
    options, rest = parser.parse_known_args(arguments)
    refuse_below_one(options, "pairs")
    config = config_of(rest)
    check_here(config)
    code, result = run_benchmark(config, CheckpointRequest(options.pairs), ENTRY, Path(config.run.root))
    if result is not None:
        print(json.dumps(result) if options.json else checkpoint_report(result))
    return code


_LABELS = {
    "save": "save, until committed",
    "dcp_save": "plain dcp.save",
    "stall": "background save: stall",
    "durable": "  until committed",
    "dcp_stall": "plain dcp.async_save: stall",
    "dcp_durable": "  until written",
    "memcpy": "memory copy of the bytes",
    "hash": "xxh3-128 hash of the bytes",
    "verify": "verify",
    "load": "load",
    "dcp_load": "plain dcp.load",
}


def checkpoint_report(result: dict[str, Any]) -> str:
    lines = [
        f"{result['strategy']}: {result['layout']}",
        f"{format_bytes(result['bytes'])} in a checkpoint, {result['world_size']} x {result['device']}, "
        f"torch {result['torch']}, in {result['path']}",
        f"medians (5 % to 95 %) of {result['rounds']} alternating rounds; reads come from the page cache",
        f"{'':<32}{'ms':>26}{'GB/s':>9}",
    ]
    for name, label in _LABELS.items():
        seconds = result["seconds"][name]
        span = f"({1e3 * seconds['p05']:,.1f} to {1e3 * seconds['p95']:,.1f})"
        speed = result["gb_per_s"][name]["median"]
        lines.append(f"{label:<32}{1e3 * seconds['median']:>8,.1f} {span:>17}{speed:>9.2f}")
    for name, ratio in result["ratio"].items():
        interval = f"(95 % interval {ratio['ci95_low']:.3f} to {ratio['ci95_high']:.3f})"
        lines.append(f"{name:<32}{ratio['median']:>8.3f} {interval}")
    return "\n".join(lines)
