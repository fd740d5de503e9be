"""``python -m hpc_train bench scaling`` measures strong and weak scaling over nodes of a cluster or local workers.

Each point is a ``bench step``; on Slurm it is a job with the resources of a training of that size. In strong scaling
the global batch is fixed, in weak scaling it grows with the ranks. Speed-up is the throughput relative to the smallest
size of the same kind, efficiency is the speed-up divided by the growth of the ranks.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from hpc_train.bench.measuring import (
    add_blocks,
    bench_parser,
    check_here,
    config_of,
    refuse_below_one,
    result_of,
    run_benchmark,
    submit,
)
from hpc_train.bench.request import StepRequest
from hpc_train.errors import UserError
from hpc_train.launch.executors.slurm import SlurmJobExecutor
from hpc_train.launch.request import check_job, compose_job, parse_line
from hpc_train.machine.allocation import workers_per_node
from hpc_train.report.plots import check_plot
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.units import GIB, counted

ENTRY = "hpc_train.bench.step_worker:measure"
WARMUP = 5  # steps before the first block
NODES = "nodes"
WORKERS = "workers"

STRONG = "strong"
WEAK = "weak"
KINDS = (STRONG, WEAK)


def main(arguments: list[str]) -> int:
    options, rest = _parser().parse_known_args(arguments)
    unit, sizes, overrides = _sizes(rest)
    refuse_below_one(options, "steps", "pairs")
    if options.plot is not None:
        check_plot(options.plot, "--plot")
    if unit == NODES and not options.multirun:
        raise UserError(
            "nodes=… needs -m, since it measures with Slurm jobs",
            where="nodes",
            fix="add -m, or use workers=1,2,4 on this machine",
        )
    points = [(kind, size, _overrides(overrides, unit, kind, size, sizes)) for kind in KINDS for size in sizes]
    if unit == NODES:
        step = ["--steps", str(options.steps), "--pairs", str(options.pairs), "--json"]
        results = measure_on_slurm([(size, [*step, *words]) for _, size, words in points])
    else:
        results = _measure_locally([words for _, _, words in points], options)
    if results is None:
        return Exit.FAILED
    rows = []
    for kind in KINDS:
        of_kind = [(size, result) for (k, size, _), result in zip(points, results, strict=True) if k == kind]
        rows += scaling_rows(kind, of_kind)
    if options.csv is not None:
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(ScalingRow)])
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
    if options.plot is not None:
        write_plot(rows, unit, options.plot)
    prose = paragraph(rows, results[0], unit)
    if options.json:
        print(json.dumps({"unit": unit, "rows": [asdict(row) for row in rows], "paragraph": prose}))
    else:
        print(f"{table(rows, unit)}\n\n{prose}")
    return Exit.DONE


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser(
        "scaling",
        "nodes=1,2,4 -m | workers=1,2,4 [overrides] [--csv FILE] [--plot FILE] [--steps N] [--pairs N]",
        "Measures strong and weak scaling of training steps and prints a paragraph for a proposal. batch.global_size is"
        " fixed in strong scaling and applies to the smallest size in weak scaling.",
        [
            "python -m hpc_train bench scaling +strategy=dp workers=1,2,4",
            "python -m hpc_train bench scaling +strategy=hybrid model=gpt_124m nodes=1,2,4 cluster.time=00:20:00 -m"
            " --plot s.png",
        ],
    )
    parser.add_argument("-m", "--multirun", action="store_true", help="submit one Slurm job per measurement")
    add_blocks(parser, 10, 5)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot speed-up and efficiency (needs matplotlib)")
    return parser


def _sizes(arguments: Sequence[str]) -> tuple[str, list[int], list[str]]:
    """Parses ``nodes=1,2,4`` or ``workers=1,2,4``; returns the unit, the sizes and the other arguments."""
    given = [argument for argument in arguments if argument.partition("=")[0] in (NODES, WORKERS)]
    fix = "nodes=1,2,4 with -m on Slurm, or workers=1,2,4 on this machine"
    if len(given) != 1:
        raise UserError(
            f"bench scaling needs one list of sizes, nodes=… or workers=…, got {len(given)}",
            where="nodes, workers",
            fix=fix,
        )
    unit, _, listed = given[0].partition("=")
    numbers = listed.split(",")
    if not all(number.isdigit() and int(number) for number in numbers):
        raise UserError(f"{unit} must be a list of numbers, got {listed!r}", where=unit, fix=fix)
    return unit, sorted({int(number) for number in numbers}), [other for other in arguments if other not in given]


def _overrides(rest: Sequence[str], unit: str, kind: str, size: int, sizes: Sequence[int]) -> list[str]:
    config = config_of([*rest])
    gpus, _ = workers_per_node(config.cluster)
    point_overrides = [*rest]
    if unit == NODES:
        point_overrides.append(f"cluster.nodes={size}")
    elif gpus:
        point_overrides.append(f"cluster.gpus_per_node={size}")
    else:
        point_overrides.append(f"cluster.cpu_workers={size}")
        if config.train.threads == "auto":  # otherwise every size would use all cores, and nothing would scale
            point_overrides.append(f"train.threads={max(1, len(os.sched_getaffinity(0)) // sizes[-1])}")
    samples: float = config.batch.global_size
    if kind == WEAK:
        samples *= size / sizes[0]
    return [*point_overrides, f"batch.global_size={round(samples)}"]


def _measure_locally(points: Sequence[Sequence[str]], options: argparse.Namespace) -> list[dict[str, Any]] | None:
    results = []
    for overrides in points:
        config = config_of([*overrides])
        check_here(config)
        _, result = run_benchmark(config, StepRequest(options.steps, options.pairs, WARMUP, None), ENTRY)
        if result is None:
            return None
        results.append(result)
    return results


@dataclass(frozen=True)
class ScalingRow:
    """Holds one measurement.

    Attributes:
        size: number of nodes or workers, as on the command line.
        epoch_s: seconds for all samples of the training data at this speed.
        memory_gib: peak memory of the rank that needs most, on the GPU if there is one.
        communication_share: mean share of a step over the ranks; None without communication.
    """

    kind: str
    size: int
    ranks: int
    global_batch: int
    step_s: float
    samples_per_s: float
    speed_up: float
    efficiency: float
    epoch_s: float
    memory_gib: float
    communication_share: float | None


def scaling_rows(kind: str, results: Sequence[tuple[int, dict[str, Any]]]) -> list[ScalingRow]:
    """Returns the rows for pairs of a size and its result of ``bench step``, smallest size first."""
    rows: list[ScalingRow] = []
    for size, result in results:
        speed = result["samples_per_s"]["median"]
        ranks = result["world_size"]
        speed_up = 1.0
        growth = 1.0  # of the number of ranks
        if rows:
            speed_up = speed / rows[0].samples_per_s
            growth = ranks / rows[0].ranks
        memory = max(result["memory"]["device_peak_bytes"] or result["memory"]["host_peak_bytes"])
        shares = result["communication_share"]
        rows.append(
            ScalingRow(
                kind=kind,
                size=size,
                ranks=ranks,
                global_batch=result["global_batch"],
                step_s=result["step_s"]["median"],
                samples_per_s=speed,
                speed_up=speed_up,
                efficiency=speed_up / growth,
                epoch_s=result["samples"] / speed,
                memory_gib=memory / GIB,
                communication_share=shares and fmean(shares),
            )
        )
    return rows


def table(rows: Sequence[ScalingRow], unit: str) -> str:
    lines = [
        f"{'':6} {unit:>7} {'ranks':>5} {'batch':>7} {'step':>9} {'samples/s':>10} {'speed-up':>8} {'efficiency':>10} "
        f"{'epoch':>9} {'GiB/rank':>8} {'comm.':>6}"
    ]
    for row in rows:
        share = "-" if row.communication_share is None else f"{row.communication_share:.1%}"
        lines.append(
            f"{row.kind:6} {row.size:>7} {row.ranks:>5} {row.global_batch:>7} {1e3 * row.step_s:>6.1f} ms "
            f"{row.samples_per_s:>10,.1f} {row.speed_up:>8.2f} {row.efficiency:>10.1%} {_duration(row.epoch_s):>9} "
            f"{row.memory_gib:>8.2f} {share:>6}"
        )
    return "\n".join(lines)


def paragraph(rows: Sequence[ScalingRow], result: dict[str, Any], unit: str) -> str:
    """Describes the measurements in prose for a proposal for computing time. ``result`` is the result of any of the
    measurements, which share the model and the software versions."""
    strong, weak = ([row for row in rows if row.kind == kind] for kind in KINDS)
    first = strong[0]
    last = strong[-1]
    shares = [row.communication_share for row in strong if row.communication_share is not None]
    text = (
        f"We measured the scaling of our training (a model of {result['parameters']:,} parameters in "
        f"{result['precision']}, strategy {result['strategy']}, PyTorch {result['torch']}) on {first.size} to "
        f"{last.size} {unit} with {last.ranks // last.size} x {result['device']} each. With the global batch fixed at "
        f"{first.global_batch} samples (strong scaling), the step time decreases from {1e3 * first.step_s:.1f} ms to "
        f"{1e3 * last.step_s:.1f} ms, a speed-up of {last.speed_up:.2f} and a parallel efficiency of "
        f"{last.efficiency:.0%} on {last.ranks} ranks. With {weak[0].global_batch // weak[0].size} samples per "
        f"{unit.removesuffix('s')} (weak scaling), the efficiency on {weak[-1].ranks} ranks is "
        f"{weak[-1].efficiency:.0%}. "
    )
    if shares:
        text += f"Communication that does not overlap with computation takes {shares[-1]:.0%} of that step. "
    device_hours = last.epoch_s * last.ranks / 3600
    text += (
        f"One epoch of {result['samples']:,} samples takes {_duration(last.epoch_s)} on {last.size} {unit}, which is "
        f"{device_hours:.2g} device-hours, and at most {last.memory_gib:.1f} GiB of memory per rank. All figures are "
        f"medians of {result['blocks']} blocks of {result['steps_per_block']} steps."
    )
    return text


def write_plot(rows: Sequence[ScalingRow], unit: str, path: Path) -> None:
    """Plots speed-up and efficiency over the size; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    speed, efficiency = figure.subplots(1, 2)
    for kind in KINDS:
        of_kind = [row for row in rows if row.kind == kind]
        speed.plot([row.size for row in of_kind], [row.speed_up for row in of_kind], marker="o", label=kind)
        efficiency.plot([row.size for row in of_kind], [row.efficiency for row in of_kind], marker="o", label=kind)
    sizes = sorted({row.size for row in rows})
    speed.plot(sizes, [size / sizes[0] for size in sizes], linestyle="--", color="gray", label="ideal")
    efficiency.set_ylim(0, 1.1)
    for axes, name in ((speed, "speed-up"), (efficiency, "efficiency")):
        axes.set_xlabel(unit)
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h"


def measure_on_slurm(steps: Sequence[tuple[int, Sequence[str]]]) -> list[dict[str, Any]] | None:
    """Submits a ``bench step`` for each number of nodes, with its arguments; returns the results in order, or None if
    one of them failed. Raises UserError if a job cannot run on the cluster, or Slurm rejects it."""
    executor = SlurmJobExecutor()
    jobs = []
    for _, words in steps:
        composed = compose_job(parse_line([word for word in words if "=" in word]), "bench")
        jobs.append(check_job(composed.config, RunDirectory(Path("scaling")), overrides=composed.overrides))
    folder = Path(jobs[0].config.run.root).absolute() / f"scaling-{secrets.token_hex(3)}"
    submitted = []
    for job, (nodes, words) in zip(jobs, steps, strict=True):
        measurement = submit(job, ["step", *words], folder, executor)
        submitted.append(measurement)
        size = counted(nodes, "node", "nodes")
        print(f"Slurm job {measurement.job_id}: {size}, output in {measurement.log}", file=sys.stderr)
    results = [result_of(measurement) for measurement in submitted]
    present = [result for result in results if result is not None]
    return present if len(present) == len(results) else None
