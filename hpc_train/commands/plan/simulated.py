"""``plan --simulate`` prints how a training scales to many GPUs that fail, and draws it."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpc_train.commands.plan.asked import Asked
from hpc_train.commands.plan.printed import print_fitting, split
from hpc_train.commands.plan.progress import shown
from hpc_train.planner.candidates import Candidate
from hpc_train.planner.machine import Machine
from hpc_train.planner.scaling import MOST_COMPARED, RATES, Assumed, Point, Range, scale
from hpc_train.report.plots import check_scaling_plot, draw_scaling
from hpc_train.run.exits import Exit
from hpc_train.telemetry.terminal import Terminal, wide
from hpc_train.units import format_duration

COLUMNS = (
    "GPUs", "layout", "batch", "step, s", "samples/s", "speed-up", "efficiency", "failures a day", "save every",
    "useful time", "time",
)  # fmt: skip
LEAST_NEEDED = ("batch", "save every", "failures a day", "speed-up", "step, s", "useful time")  # the least first
MOST = 10_000  # GPUs
UNITS = (("days", 86400), ("h", 3600), ("min", 60))
KINDS = ("weak", "strong")


def simulate(asked: Asked, machine: Machine, counts: Sequence[int], options: Namespace) -> int:
    """Prints a row for each number of GPUs, and writes the picture.

    Raises:
        UserError: the training fits on no number of GPUs, or the picture cannot be written.
    """
    out: Path | None = options.out
    if out is not None:
        check_scaling_plot(out)
    rates = RATES if options.failures is None else (options.failures,) * 3
    assumed = Assumed(rates, options.storage * 1e9, options.simulate == "weak")
    points = [*scale(asked.config, machine, shown(counts), asked.kept, assumed, options.also)]
    if options.json:
        json.dump([_as_json(point) for point in points], sys.stdout, indent=1)
        print()
    else:
        _print(points, machine, assumed)
    if out is not None:
        draw_scaling(out, [_as_json(point) for point in points], f"{options.simulate} scaling on {machine.name}")
        print(f"drawn: {out}", file=sys.stderr)
    return Exit.DONE


def simulated_counts(machine: Machine) -> list[int]:
    """Returns the numbers of GPUs that are simulated by default: nodes in powers of two, and ten thousand GPUs."""
    per_node = machine.devices_per_node
    if machine.rates.cores:
        return [1 << power for power in range(per_node.bit_length()) if 1 << power <= per_node]
    counts = [per_node]
    while counts[-1] * 2 <= MOST:
        counts.append(counts[-1] * 2)
    return [*counts, MOST // per_node * per_node]


def _print(points: Sequence[Point], machine: Machine, assumed: Assumed) -> None:
    console = wide(Terminal())
    kind = "the batch grows with the GPUs" if assumed.grows else "the batch stays the same"
    console.print(f"on {machine.name} ({machine.device}); {kind}:", highlight=False)
    cells = [_cells(point) for point in points]
    print_fitting(console, COLUMNS, cells, {*COLUMNS} - {"layout"}, {"layout": 16}, LEAST_NEEDED)
    for line in _assumptions(points, assumed):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _cells(point: Point) -> list[str]:
    return [
        f"{point.candidate.devices:,}",
        split(point.candidate.layout) + _recomputed(point.candidate),
        f"{point.batch:,}",
        _range(point.step_s),
        _range(point.samples_per_s),
        f"{point.speedup:,.1f}",
        f"{point.efficiency:.0%}",
        _range(point.failures_per_day),
        format_duration(point.save_every_s),
        f"{point.useful.low:.1%} - {point.useful.high:.1%}",
        "unknown" if point.seconds is None else _time(point.seconds),
    ]


def _recomputed(candidate: Candidate) -> str:
    recomputed = str(candidate.values["train.activation_checkpointing"])
    return "" if recomputed == "none" else f", {recomputed} recompute"


def _range(value: Range) -> str:
    """Returns the ends of an interval; one number if it has no width."""
    low, high = _short(value.low), _short(value.high)
    return low if low == high else f"{low} - {high}"


def _time(seconds: Range) -> str:
    """Returns an interval in minutes, hours or days."""
    unit, size = next(found for found in UNITS if seconds.middle >= 2 * found[1] or found == UNITS[-1])
    return f"{_range(Range(*(part / size for part in vars(seconds).values())))} {unit}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _assumptions(points: Sequence[Point], assumed: Assumed) -> list[str]:
    low, _, high = assumed.failures_per_gpu_hour
    rates = f"{low:.2g}" if low == high else f"{low:.2g} (RSC-2) to {high:.2g} (RSC-1)"
    lines = [
        f"assumed: {rates} failures per GPU-hour; a file system of {assumed.storage_bytes_per_s / 1e9:g} GB/s; two "
        "minutes to detect a failure and restart, and the time to read the checkpoint; one second for which a save "
        "blocks, and the copy to host memory",
        "intervals: 80 % of published step times lie in those of the step; the failures add theirs",
    ]
    beyond = [point for point in points if point.candidate.devices > MOST_COMPARED]
    if beyond:
        lines.append(
            f"beyond {MOST_COMPARED:,} GPUs no published step times were compared: the intervals are those of "
            f"{MOST_COMPARED:,}, and the truth may lie outside"
        )
    return lines


def _as_json(point: Point) -> dict[str, Any]:
    candidate = point.candidate
    values = {name: value for name, value in vars(point).items() if name != "candidate"}
    return {
        "gpus": candidate.devices,
        **candidate.to_json(),
        **{name: asdict(value) if isinstance(value, Range) else value for name, value in values.items()},
    }
