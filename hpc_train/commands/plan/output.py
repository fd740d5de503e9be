"""Prints a plan: its table, its rows as JSON, and with ``--simulate`` how training scales to many GPUs that fail."""

from __future__ import annotations

import json
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpc_train.commands.plan.rows import NOISE, PlannedTraining, Row, full_command, with_progress
from hpc_train.layout.layout import Layout
from hpc_train.layout.sizes import describe_active
from hpc_train.planner.candidates import COMPILE
from hpc_train.planner.machine import Machine
from hpc_train.planner.scaling import MOST_COMPARED, RATES, Assumed, Point, Range, scale
from hpc_train.report.plots import check_plot, draw_scaling
from hpc_train.run.exits import Exit
from hpc_train.telemetry.terminal import Terminal, print_fitting, wide
from hpc_train.units import format_bytes, format_duration, format_hours

WHY = "more than the row above"
FOLDED = {"layout": 16, WHY: 13}  # continue in the next line on a narrow terminal
KINDS = {"measured": "measured", "table": "from tables", "assumed": "assumed"}  # kind of a machine's number -> words
LEAST_NEEDED = ("MFU", "recompute", "batches", "GPU-hours", "starts", "parameters", "time")  # the least first
SCALING_COLUMNS = (
    "GPUs", "layout", "batch", "step, s", "samples/s", "speed-up", "efficiency", "failures a day", "save every",
    "useful time", "time",
)  # fmt: skip
SCALING_LEAST_NEEDED = (
    "batch",
    "save every",
    "failures a day",
    "speed-up",
    "step, s",
    "useful time",
)  # the least first
MOST = 10_000  # GPUs
UNITS = (("days", 86400), ("h", 3600), ("min", 60))
SCALING_KINDS = ("weak", "strong")


def print_table(rows: Sequence[Row], machine: Machine, compared: int) -> None:
    best = "the best"
    if rows[0].training.model:
        best = "the largest model"
    cells: list[dict[str, str]] = []
    for row, above in zip(rows, [None, *rows[:-1]], strict=True):
        cells.append({"": str(len(cells) + 1), **_cells(row), WHY: _why_slower(row, above)})
    columns = [*cells[0]]
    console = wide(Terminal())
    console.print(f"{compared} layouts on {machine.name} ({machine.device}), {best} first:", highlight=False)
    texts = {"layout", "recompute", "model", WHY}
    print_fitting(console, columns, [[*row.values()] for row in cells], {*columns} - texts, FOLDED, LEAST_NEEDED)


def print_parts(first: Row) -> None:
    """Prints the speed of the first row, and the parts of its step and of its memory."""
    prediction = first.prediction
    parts = ", ".join(f"{name} {_seconds(value)}" for name, value in prediction.parts_s.items() if value)
    speed = f"{prediction.samples_per_s:,.3g} samples/s"
    if prediction.tokens_per_s > prediction.samples_per_s:
        speed = f"{format_hours(prediction.tokens_per_s)} tokens/s"
    lines = [f"row 1: {speed}; step: {parts}"]
    active = describe_active(first.training.config.model)
    if active is not None:
        lines.append(f"row 1: {active}")
    if prediction.memory is not None:
        others = format_bytes(prediction.needed_bytes - prediction.memory.total)
        lines.append(f"row 1: tensors {prediction.memory}; context, libraries and allocator {others}")
    for line in lines:
        wide(Terminal()).print(line, markup=False, highlight=False, soft_wrap=True)


def _seconds(value: float) -> str:
    if value >= 60:
        return format_duration(value)
    return f"{value:.3g} s"


def print_commands(rows: Sequence[Row], machine: Machine) -> None:
    """Prints a command for each row. The beginning that a command shares with the first one is printed only once."""
    console = wide(Terminal())
    for number, row in enumerate(rows):
        words = row.training.command(row.candidate, machine)
        text = f"... {shlex.join(words)} -m"
        if number == 0 or row.training is not rows[0].training:
            text = full_command(row.training.line, words)
        console.print(f"{number + 1}: {text}", markup=False, highlight=False, soft_wrap=True)
    kinds = [figure.kind for figure in machine.figures.values()]
    counts = ", ".join(f"{kinds.count(kind)} {text}" for kind, text in KINDS.items() if kind in kinds)
    text = f"numbers of the machine: {counts}; not modeled: reading of data, saves, evaluations, slow nodes"
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _cells(row: Row) -> dict[str, str]:
    """Returns the cells by their column."""
    prediction = row.prediction
    layout = row.candidate.layout
    values = row.candidate.values
    cells = {}
    if row.training.model:
        cells["model"] = row.training.model
        cells["parameters"] = f"{(row.training.parameters or 0) / 1e9:.3g} B"
        if row.training.active_parameters != row.training.parameters:
            cells["parameters"] += f", {(row.training.active_parameters or 0) / 1e9:.3g} active"
    techniques = ""  # the layout does not name these
    if values.get("strategy.offload", "none") != "none":
        techniques += f", {values['strategy.offload']} in host memory"
    if values.get("strategy.compression", "none") != "none":
        techniques += f", {values['strategy.compression']} gradients"
    if values.get(COMPILE, False) and not row.training.config.train.compile:
        techniques += ", compiled"
    cells |= {
        "GPUs": str(row.candidate.devices),
        "layout": split(layout) + techniques,
        "batches": f"{layout.micro_batches} x {layout.micro_size}",
        "recompute": str(values["train.activation_checkpointing"]),
        "memory": format_bytes(prediction.needed_bytes),
        "step": _seconds(prediction.step_s),
        "MFU": f"{prediction.mfu:.0%}",
        "time": "unknown" if row.seconds is None else format_duration(row.seconds),
        "GPU-hours": "unknown" if row.gpu_hours is None else format_hours(row.gpu_hours),
    }
    if row.prices.gpu_hour is not None:
        column = f"cost, {row.prices.currency}".rstrip(", ")
        cells[column] = "unknown" if row.cost is None else format_hours(row.cost)
    if row.start is not None:
        cells["starts"] = _clock(row.start.at)
        cells["done"] = _clock(row.done)
    if row.refused:
        cells |= {"starts": "refused", "done": ""}
    return cells


def _clock(seconds: float | None) -> str:
    """Returns a time for the table, with the date unless it is today: ``14:10``, ``11-25 14:10``."""
    if seconds is None:
        return "unknown"
    at = time.localtime(seconds)
    if time.localtime()[:3] == at[:3]:
        return time.strftime("%H:%M", at)
    return time.strftime("%m-%d %H:%M", at)


def split(layout: Layout) -> str:
    """Returns the layout in few words: ``dp 8 x pp 2, zero1, 1f1b``."""
    sizes = {"dp": layout.dp, "pp": layout.pp, "cp": layout.cp, "tp": layout.tp}
    text = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1 device"
    if layout.ep > 1:
        text += f", ep {layout.ep}"
    if layout.dp_cp > 1:
        text += f", {layout.data_parallel}"
        if layout.shards_state and layout.shard < layout.dp_cp:
            text += f" over {layout.shard}"
    if layout.pp > 1:
        text += f", {layout.schedule}"
    return text


def _why_slower(row: Row, above: Row | None) -> str:
    """Returns which part of the step takes longer than in the row above, and by how much."""
    if above is None:
        return ""
    if row.candidate.devices != above.candidate.devices:
        return f"{row.candidate.devices} GPUs instead of {above.candidate.devices}"
    if row.training is not above.training:
        return "a smaller model"
    part, longer = row.prediction.longest_beside(above.prediction)
    if longer < NOISE / 10 * above.prediction.step_s:
        return "equally fast, more techniques"
    return f"{part} +{longer:.2g} s"


def row_as_json(row: Row, machine: Machine) -> dict[str, Any]:
    return {
        "model": row.training.model or None,
        "parameters": row.training.parameters,
        "active_parameters": row.training.active_parameters,
        "gpus": row.candidate.devices,
        "nodes": row.candidate.nodes,
        **row.candidate.to_json(),
        "tokens_per_s": row.prediction.tokens_per_s,
        "mfu": row.prediction.mfu,
        "seconds": row.seconds,
        "gpu_hours": row.gpu_hours,
        "cost": row.cost,
        "currency": row.prices.currency or None,
        "starts": None if row.start is None else row.start.at,
        "done": row.done,
        "command": full_command(row.training.line, row.training.command(row.candidate, machine)),
    }


def simulate(training: PlannedTraining, machine: Machine, counts: Sequence[int], options: Namespace) -> int:
    """Prints a row for each number of GPUs, and writes the picture.

    Raises:
        UserError: training fits on no number of GPUs, or the picture cannot be written.
    """
    out: Path | None = options.out
    if out is not None:
        check_plot(out, "--out")
    rates = RATES
    if options.failures is not None:
        rates = (options.failures,) * 3
    assumed = Assumed(rates, options.storage * 1e9, options.simulate == "weak")
    points = [*scale(training.config, machine, with_progress(counts), training.fixed, assumed, options.also)]
    rows = [point_as_json(point) for point in points]
    if options.json:
        json.dump(rows, sys.stdout, indent=1)
        print()
    else:
        _print_points(points, machine, assumed)
    if out is not None:
        draw_scaling(out, rows, f"{options.simulate} scaling on {machine.name}")
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


def _print_points(points: Sequence[Point], machine: Machine, assumed: Assumed) -> None:
    console = wide(Terminal())
    kind = "the batch grows with the GPUs" if assumed.grows else "the batch stays the same"
    console.print(f"on {machine.name} ({machine.device}); {kind}:", highlight=False)
    cells = []
    for point in points:
        layout = split(point.candidate.layout)
        recomputed = point.candidate.values["train.activation_checkpointing"]
        if recomputed != "none":
            layout += f", {recomputed} recompute"
        cells.append(
            [
                f"{point.candidate.devices:,}",
                layout,
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
        )
    numbers = {*SCALING_COLUMNS} - {"layout"}
    print_fitting(console, SCALING_COLUMNS, cells, numbers, {"layout": 16}, SCALING_LEAST_NEEDED)
    for line in _assumptions(points, assumed):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _range(value: Range) -> str:
    """Returns the ends of an interval; one number if it has no width."""
    ends = [f"{end:,.0f}" if end >= 100 else f"{end:.3g}" for end in (value.low, value.high)]
    return " - ".join(dict.fromkeys(ends))


def _time(seconds: Range) -> str:
    """Returns an interval in minutes, hours or days."""
    unit, size = next((unit for unit in UNITS if seconds.middle >= 2 * unit[1]), UNITS[-1])
    return f"{_range(Range(*(part / size for part in vars(seconds).values())))} {unit}"


def _assumptions(points: Sequence[Point], assumed: Assumed) -> list[str]:
    low, _, high = assumed.failures_per_gpu_hour
    rates = f"{low:.2g}"
    if low != high:
        rates = f"{low:.2g} (RSC-2) to {high:.2g} (RSC-1)"
    lines = [
        f"assumed: {rates} failures per GPU-hour; a file system of {assumed.storage_bytes_per_s / 1e9:g} GB/s; two "
        "minutes to detect a failure and restart, and the time to read the checkpoint; one second for which a save "
        "blocks, and the copy to host memory",
        "intervals: 80 % of published step times lie within the interval of the step; the failures widen it",
    ]
    beyond = [point for point in points if point.candidate.devices > MOST_COMPARED]
    if beyond:
        lines.append(
            f"beyond {MOST_COMPARED:,} GPUs no published step times were compared: the intervals are those of "
            f"{MOST_COMPARED:,} GPUs, and the true values may lie outside"
        )
    return lines


def point_as_json(point: Point) -> dict[str, Any]:
    candidate = point.candidate
    values = {name: value for name, value in vars(point).items() if name != "candidate"}
    return {
        "gpus": candidate.devices,
        **candidate.to_json(),
        **{name: asdict(value) if isinstance(value, Range) else value for name, value in values.items()},
    }
