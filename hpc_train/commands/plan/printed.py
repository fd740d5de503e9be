"""The table of a plan, and its rows as JSON."""

from __future__ import annotations

import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich.console import Console

from hpc_train.commands.plan.asked import full_command
from hpc_train.commands.plan.rows import NOISE, Row
from hpc_train.layout.layout import Layout
from hpc_train.planner.candidates import Values
from hpc_train.planner.machine import Machine
from hpc_train.telemetry.terminal import Terminal, fitting_table, wide
from hpc_train.units import format_bytes, format_duration, format_hours

COLUMNS = ("", "GPUs", "layout", "batches", "recompute", "memory", "step", "MFU", "time", "GPU-hours")
MODEL = ("model", "parameters")  # of a plan that compares models
QUEUE = ("starts", "done")
WHY = "more than the row above"
FOLDED = {"layout": 16, WHY: 13}  # continue in the next line on a narrow terminal
KINDS = {"measured": "measured", "table": "from tables", "assumed": "assumed"}  # of the numbers of a machine
LEAST_NEEDED = ("MFU", "recompute", "batches", "GPU-hours", "starts", "parameters", "time")  # the least first


def print_table(rows: Sequence[Row], machine: Machine, compared: int) -> None:
    first = rows[0]
    models = MODEL if first.asked.model else ()
    cost = () if first.prices.gpu_hour is None else (f"cost, {first.prices.currency}".rstrip(", "),)
    in_queue = QUEUE if any(row.start is not None for row in rows) else ()
    columns = [COLUMNS[0], *models, *COLUMNS[1:], *cost, *in_queue, WHY]
    above = [None, *rows]
    cells = [
        [str(number + 1), *_model(row), *_cells(row), *_in_queue(row), _why_slower(row, above[number])]
        for number, row in enumerate(rows)
    ]
    console = wide(Terminal())
    best = "the largest model" if models else "the best"
    console.print(f"{compared} layouts on {machine.name} ({machine.device}), {best} first:", highlight=False)
    texts = {"layout", "recompute", "model", WHY}
    print_fitting(console, columns, cells, {*columns} - texts, FOLDED, LEAST_NEEDED)


def print_fitting(
    console: Console,
    columns: Sequence[str],
    cells: Sequence[Sequence[str]],
    numbers: Collection[str],
    folded: Mapping[str, int],
    least_needed: Sequence[str],
) -> None:
    """Prints a table without the columns for which the terminal has no room, and their names."""
    table, left_out = fitting_table(columns, cells, console.width, numbers, folded, least_needed)
    console.print(table)
    if left_out:
        names = ", ".join(left_out)
        console.print(f"left out of this narrow table, but in --json: {names}", markup=False, highlight=False)


def print_parts(first: Row) -> None:
    """Prints the speed of the first row, and the parts of its step and of its memory."""
    prediction = first.prediction
    parts = ", ".join(f"{name} {_seconds(value)}" for name, value in prediction.parts_s.items() if value)
    speed = f"{prediction.samples_per_s:,.3g} samples/s"
    if prediction.tokens_per_s > prediction.samples_per_s:
        speed = f"{format_hours(prediction.tokens_per_s)} tokens/s"
    lines = [f"row 1: {speed}; step: {parts}"]
    if prediction.memory is not None:
        beside = prediction.needed_bytes - prediction.memory.total
        lines.append(f"row 1: tensors {prediction.memory}; context, libraries and allocator {format_bytes(beside)}")
    for line in lines:
        wide(Terminal()).print(line, markup=False, highlight=False, soft_wrap=True)


def _seconds(value: float) -> str:
    return format_duration(value) if value >= 60 else f"{value:.3g} s"


def print_commands(rows: Sequence[Row], machine: Machine) -> None:
    """Prints a command for each row. The beginning that it shares with the first row's is printed once."""
    console = wide(Terminal())
    for number, row in enumerate(rows):
        words = row.asked.command(row.candidate, machine)
        whole = number == 0 or row.asked is not rows[0].asked
        text = full_command(row.asked.line, words) if whole else f"... {shlex.join(words)} -m"
        console.print(f"{number + 1}: {text}", markup=False, highlight=False, soft_wrap=True)
    console.print(_origin(machine), markup=False, highlight=False, soft_wrap=True)


def _model(row: Row) -> list[str]:
    return [row.asked.model, f"{(row.asked.parameters or 0) / 1e9:.3g} B"] if row.asked.model else []


def _cells(row: Row) -> list[str]:
    prediction, layout, values = row.prediction, row.candidate.layout, row.candidate.values
    cells = [
        str(row.candidate.devices),
        split(layout) + _further(values),
        f"{layout.micro_batches} x {layout.micro_size}",
        str(values["train.activation_checkpointing"]),
        format_bytes(prediction.needed_bytes),
        _seconds(prediction.step_s),
        f"{prediction.mfu:.0%}",
        "unknown" if row.seconds is None else format_duration(row.seconds),
        "unknown" if row.gpu_hours is None else format_hours(row.gpu_hours),
    ]
    if row.prices.gpu_hour is None:
        return cells
    return [*cells, "unknown" if row.cost is None else format_hours(row.cost)]


def _further(values: Values) -> str:
    """Returns what the layout does not say: ``, optimizer in host memory``."""
    offload, sent = (values.get(f"strategy.{name}", "none") for name in ("offload", "compression"))
    return (f", {offload} in host memory" if offload != "none" else "") + (
        f", {sent} gradients" if sent != "none" else ""
    )


def _in_queue(row: Row) -> list[str]:
    if row.start is None:
        return []
    return ["refused", ""] if row.refused else [_clock(row.start.at), _clock(row.done)]


def _clock(seconds: float | None) -> str:
    """Returns a time for the table, with the date unless it is today: ``14:10``, ``11-25 14:10``."""
    if seconds is None:
        return "unknown"
    at = time.localtime(seconds)
    today = time.localtime()[:3] == at[:3]
    return time.strftime("%H:%M" if today else "%m-%d %H:%M", at)


def split(layout: Layout) -> str:
    """Returns the layout in few words: ``dp 8 x pp 2, zero1, 1f1b``."""
    sizes = {"dp": layout.dp, "pp": layout.pp, "cp": layout.cp, "tp": layout.tp}
    split = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1 device"
    sharded = f" over {layout.shard}" if layout.shards_state and layout.shard < layout.dp_cp else ""
    kind = f", {layout.data_parallel}{sharded}" if layout.dp_cp > 1 else ""
    return split + kind + (f", {layout.schedule}" if layout.pp > 1 else "")


def _why_slower(row: Row, above: Row | None) -> str:
    """Returns which part of the step is longer than that of the row above, and by how much."""
    if above is None:
        return ""
    if row.candidate.devices != above.candidate.devices:
        return f"{row.candidate.devices} GPUs instead of {above.candidate.devices}"
    if row.asked is not above.asked:
        return "a smaller model"
    part, longer = row.prediction.longest_beside(above.prediction)
    if longer < NOISE / 10 * above.prediction.step_s:
        return "equally fast, more techniques"
    return f"{part} +{longer:.2g} s"


def _origin(machine: Machine) -> str:
    """Returns how many numbers of the machine were measured."""
    kinds = [figure.kind for figure in machine.figures.values()]
    counts = ", ".join(f"{kinds.count(kind)} {text}" for kind, text in KINDS.items() if kind in kinds)
    return f"numbers of the machine: {counts}; not modeled: reading of data, saves, evaluations, slow nodes"


def as_json(row: Row, machine: Machine) -> dict[str, Any]:
    return {
        "model": row.asked.model or None,
        "parameters": row.asked.parameters,
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
        "command": full_command(row.asked.line, row.asked.command(row.candidate, machine)),
    }
