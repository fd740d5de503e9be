"""``python -m hpc_train bench scaling``: strong and weak scaling over nodes of a cluster, or workers of this machine.

Every point is a ``bench step``: on this machine one after the other, on Slurm a job for each size.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpc_train.cluster.allocation import workers_per_node
from hpc_train.commands.bench.measuring import config_of, measured
from hpc_train.config.errors import ConfigError
from hpc_train.config.validate import validate
from hpc_train.launch.bench_job import measure_on_slurm
from hpc_train.measure.collectives_report import check_plot
from hpc_train.measure.request import StepRequest
from hpc_train.measure.scaling import KINDS, STRONG, paragraph, scaling_rows, table, write_csv, write_plot
from hpc_train.run.exits import Exit

ENTRY = "hpc_train.train.benchmark:measure"
WARMUP = 5  # steps before the first block
NODES, WORKERS = "nodes", "workers"

_EPILOG = """\
examples:
  python -m hpc_train bench scaling +strategy=dp workers=1,2,4
  python -m hpc_train bench scaling +strategy=hybrid model=gpt_124m nodes=1,2,4 cluster.time=00:20:00 -m --plot s.png
"""


def main(arguments: list[str]) -> int:
    """Measures and prints; returns an exit code."""
    options, rest = _parser().parse_known_args(arguments)
    unit, sizes, overrides = _sizes(rest)
    if min(options.steps, options.pairs) < 1:
        raise ConfigError("nothing to measure", where="--steps, --pairs", mend="1 or more")
    if options.plot is not None:
        check_plot(options.plot)
    if unit == NODES and not options.multirun:
        raise ConfigError("several nodes are measured by jobs on Slurm", where="nodes", mend="-m, or workers=1,2,4")
    points = [(kind, size, _overrides(overrides, unit, kind, size, sizes)) for kind in KINDS for size in sizes]
    if unit == NODES:
        step = ["--steps", str(options.steps), "--pairs", str(options.pairs), "--json"]
        found = measure_on_slurm([[*step, *own] for _, _, own in points], [size for _, size, _ in points])
    else:
        found = _here([own for _, _, own in points], options)
    if found is None:
        return Exit.FAILED
    rows = [
        row
        for kind in KINDS
        for row in scaling_rows(
            kind, [(size, result) for (k, size, _), result in zip(points, found, strict=True) if k == kind]
        )
    ]
    if options.csv is not None:
        write_csv(rows, options.csv)
    if options.plot is not None:
        write_plot(rows, unit, options.plot)
    words = paragraph(rows, found[0], unit)
    if options.json:
        print(json.dumps({"unit": unit, "rows": [asdict(row) for row in rows], "paragraph": words}))
    else:
        print(f"{table(rows, unit)}\n\n{words}")
    return Exit.DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hpc_train bench scaling",
        usage="python -m hpc_train bench scaling nodes=1,2,4 -m | workers=1,2,4 [overrides] [--csv FILE] [--plot FILE]"
        " [--steps N] [--pairs N] [--json]",
        description="Strong and weak scaling of training steps, with the paragraph for a proposal. The overrides are"
        " those of a training; batch.global_size is that of strong scaling, and of the smallest size in weak scaling.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-m", "--multirun", action="store_true", help="submit to Slurm, a job for each measurement")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="of a block (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=5, metavar="N", help="blocks (default: %(default)s)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw speed-up and efficiency (matplotlib)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _sizes(arguments: Sequence[str]) -> tuple[str, list[int], list[str]]:
    """``nodes=1,2,4`` or ``workers=1,2,4`` as unit and sizes, and the other arguments."""
    given = [argument for argument in arguments if argument.partition("=")[0] in (NODES, WORKERS)]
    mend = "nodes=1,2,4 with -m on Slurm, or workers=1,2,4 on this machine"
    if len(given) != 1:
        raise ConfigError("what is to grow is not said, or twice", where="nodes, workers", mend=mend)
    unit, _, listed = given[0].partition("=")
    numbers = listed.split(",")
    if not all(number.isdigit() and int(number) for number in numbers):
        raise ConfigError(f"{given[0]} is no list of numbers", where=unit, mend=mend)
    return unit, sorted({int(number) for number in numbers}), [other for other in arguments if other not in given]


def _overrides(rest: Sequence[str], unit: str, kind: str, size: int, sizes: Sequence[int]) -> list[str]:
    """Of one measurement."""
    config = config_of([*rest])
    gpus, _ = workers_per_node(config.cluster)
    own = [*rest]
    if unit == NODES:
        own.append(f"cluster.nodes={size}")
    elif gpus:
        own.append(f"cluster.gpus_per_node={size}")
    else:
        own.append(f"cluster.cpu_workers={size}")
        if config.train.threads == "auto":  # else the cores are all in use at every size, and nothing scales
            own.append(f"train.threads={max(1, len(os.sched_getaffinity(0)) // sizes[-1])}")
    growth = 1 if kind == STRONG else size / sizes[0]
    return [*own, f"batch.global_size={round(config.batch.global_size * growth)}"]


def _here(points: Sequence[Sequence[str]], options: argparse.Namespace) -> list[dict[str, Any]] | None:
    results = []
    for overrides in points:
        config = config_of([*overrides])
        validate(config, 1, workers_per_node(config.cluster)[1])
        _, result = measured(config, StepRequest(options.steps, options.pairs, WARMUP, None), ENTRY)
        if result is None:
            return None
        results.append(result)
    return results
