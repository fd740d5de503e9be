"""The table of a plan, and its rows as JSON."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from hpc_train.commands.plan.chosen import command_of
from hpc_train.commands.plan.rows import NOISE, Row
from hpc_train.config.arguments import CommandLine
from hpc_train.plan.layout import Layout
from hpc_train.planner.machine import Machine
from hpc_train.telemetry.terminal_table import text_table, wide
from hpc_train.units import format_bytes, format_duration

COLUMNS = ("", "GPUs", "layout", "batches", "recompute", "memory", "step", "MFU", "time", "GPU-hours")
QUEUE = ("starts", "done")
WHY = "more than the row above"


def print_table(rows: Sequence[Row], machine: Machine, line: CommandLine, compared: int) -> None:
    in_queue = QUEUE if any(row.start is not None for row in rows) else ()
    columns = [*COLUMNS, *(["cost"] if rows[0].price is not None else []), *in_queue, WHY]
    above = [None, *rows]
    cells = [
        [*_cells(number, row), *_in_queue(row), _why_slower(row, above[number])] for number, row in enumerate(rows)
    ]
    console = wide(Console())
    console.print(f"{compared} layouts on {machine.name} ({machine.device}), the best first:", highlight=False)
    console.print(text_table(columns, cells, numbers={*columns} - {"layout", "recompute", WHY}, folded={WHY}))
    for text in (f"1: {command_of(rows[0], line)}", _origin(machine)):
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def _cells(number: int, row: Row) -> list[str]:
    prediction, layout = row.prediction, row.candidate.layout
    cells = [
        str(number + 1),
        str(row.candidate.devices),
        _split(layout),
        f"{layout.micro_batches} x {layout.micro_size}",
        str(row.candidate.values["train.activation_checkpointing"]),
        format_bytes(prediction.needed_bytes),
        format_duration(prediction.step_s) if prediction.step_s >= 60 else f"{prediction.step_s:.3g} s",
        f"{prediction.mfu:.0%}",
        "unknown" if row.seconds is None else format_duration(row.seconds),
        "unknown" if row.gpu_hours is None else f"{row.gpu_hours:,.1f}",
    ]
    return cells if row.price is None else [*cells, "unknown" if row.cost is None else f"{row.cost:,.0f}"]


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


def _split(layout: Layout) -> str:
    """Returns the layout in few words: ``dp 8 x pp 2, zero1, 1f1b``."""
    sizes = {"dp": layout.dp, "pp": layout.pp, "tp": layout.tp}
    split = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1 device"
    sharded = f" over {layout.shard}" if layout.shards_state and layout.shard < layout.dp else ""
    kind = f", {layout.data_parallel}{sharded}" if layout.dp > 1 else ""
    return split + kind + (f", {layout.schedule}" if layout.pp > 1 else "")


def _why_slower(row: Row, above: Row | None) -> str:
    """Returns which part of the step is longer than that of the row above, and by how much."""
    if above is None:
        return ""
    if row.candidate.devices != above.candidate.devices:
        return f"{row.candidate.devices} GPUs instead of {above.candidate.devices}"
    part, longer = row.prediction.longest_beside(above.prediction)
    if longer < NOISE / 10 * above.prediction.step_s:
        return "equally fast, more techniques"
    return f"{part} +{longer:.2g} s"


def _origin(machine: Machine) -> str:
    """Returns how many numbers of the machine were measured."""
    kinds = [figure.kind for figure in machine.figures.values()]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    return f"numbers of the machine: {counts}; not modelled: reading of data, saves, evaluations, slow nodes"


def as_json(row: Row, line: CommandLine) -> dict[str, Any]:
    return {
        "gpus": row.candidate.devices,
        "nodes": row.candidate.nodes,
        **row.candidate.to_json(),
        "tokens_per_s": row.prediction.tokens_per_s,
        "mfu": row.prediction.mfu,
        "seconds": row.seconds,
        "gpu_hours": row.gpu_hours,
        "cost": row.cost,
        "starts": None if row.start is None else row.start.at,
        "done": row.done,
        "command": command_of(row, line),
    }
