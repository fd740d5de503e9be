"""``python -m hpc_train plan [overrides]`` predicts time, memory and cost of a training for each layout that fits."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from hpc_train.config.arguments import CommandLine
from hpc_train.config.compose import typed
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.plan.layout import Layout
from hpc_train.planner.candidates import Candidate, candidates, fastest
from hpc_train.planner.machine import Machine, read_machine, shipped
from hpc_train.planner.prediction import Prediction
from hpc_train.run.exits import Exit
from hpc_train.telemetry.terminal_table import text_table, wide
from hpc_train.units import format_bytes, format_duration

ROWS = 10
NOISE = 0.02  # layouts closer than this are equally fast; the simplest of them is first
PARTS = {"compute_s": "compute", "bubble_s": "bubble", "communication_s": "communication", "optimizer_s": "optimizer"}
ORDERS = ("time", "gpu-hours")


@dataclass(frozen=True)
class Row:
    """A layout with what the whole training takes; None where the number of steps is unknown."""

    candidate: Candidate
    steps: int | None
    price: float | None

    @property
    def prediction(self) -> Prediction:
        return self.candidate.prediction

    @property
    def seconds(self) -> float | None:
        return None if self.steps is None else self.steps * self.prediction.step_s

    @property
    def gpu_hours(self) -> float | None:
        return None if self.seconds is None else self.seconds * self.candidate.devices / 3600

    @property
    def cost(self) -> float | None:
        return None if self.gpu_hours is None or self.price is None else self.gpu_hours * self.price


def main(arguments: list[str]) -> int:
    """Prints the table.

    Raises:
        UserError: the config is wrong, the machine is unknown, or no layout fits.
    """
    options = _parse(arguments)
    line = CommandLine.parse(options.overrides)
    with line.composer() as compose:
        config = typed(compose(list(line.overrides)))
    machine = read_machine(options.machine)
    kept = _keys(line)
    found = [each for devices in options.gpus for each in candidates(config, machine, devices, kept)]
    rows = _rows(config, found, options)
    if not rows:
        raise _does_not_fit(found, machine)
    if options.json:
        json.dump([_as_json(row, line) for row in rows], sys.stdout, indent=1)
        print()
    else:
        _print(rows, machine, line, len(found))
    return Exit.DONE


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m hpc_train plan",
        description="Predicts the time of a step, the memory, the time to the end and the cost of a training for each "
        "layout that fits a machine, the fastest first. Keys that are set stay as they are; the other keys of the "
        "layout, the micro-batch and activation checkpointing are chosen.",
    )
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="config overrides, as for training")
    parser.add_argument(
        "--gpus", type=_counts, default=[8], metavar="N[,N...]", help="numbers of GPUs to compare (default: 8)"
    )
    parser.add_argument(
        "--machine", default="h100", metavar="NAME|FILE", help=f"{', '.join(shipped())}, or a machine file of your own"
    )
    parser.add_argument("--price", type=_price, metavar="X", help="the price of a GPU-hour, in any currency")
    parser.add_argument("--sort", choices=ORDERS, default="time", help="what the first row needs least of")
    parser.add_argument("--rows", type=int, default=ROWS, metavar="N", help=f"rows of the table (default: {ROWS})")
    parser.add_argument("--json", action="store_true", help="print one JSON object per row")
    return parser.parse_intermixed_args(arguments)


def _counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{min(counts)} is not a number of GPUs")
    return counts


def _price(text: str) -> float:
    price = float(text)
    if not 0 <= price < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a price")
    return price


def _rows(config: Config, found: Sequence[Candidate], options: argparse.Namespace) -> list[Row]:
    """Returns the best layout first: of each number of GPUs the same number of layouts, each technique once."""
    steps = config.train.steps if config.train.epochs is None else None
    share = max(1, options.rows // len(options.gpus))
    best = [each for devices in options.gpus for each in _distinct(fastest(_of(found, devices), NOISE))[:share]]
    rows = [Row(each, steps, options.price) for each in best]
    by_devices = options.sort == "gpu-hours"
    return sorted(rows, key=lambda row: row.prediction.step_s * (row.candidate.devices if by_devices else 1))


def _of(found: Sequence[Candidate], devices: int) -> list[Candidate]:
    return [each for each in found if each.devices == devices]


def _distinct(ranked: Sequence[Candidate]) -> list[Candidate]:
    """Returns the first candidate of each split, data-parallel kind and schedule."""
    first: dict[tuple[object, ...], Candidate] = {}
    for each in ranked:
        layout = each.layout
        first.setdefault((layout.dp, layout.pp, layout.tp, layout.data_parallel, layout.schedule), each)
    return [*first.values()]


def _does_not_fit(found: Sequence[Candidate], machine: Machine) -> UserError:
    if not found:
        return UserError(
            "no layout is possible with these settings",
            where="the command line",
            fix="set fewer keys of strategy and batch, or give another number of --gpus",
        )
    nearest = min(found, key=lambda each: each.prediction.needed_bytes)
    needed = format_bytes(nearest.prediction.needed_bytes)
    return UserError(
        f"no layout fits: {nearest.layout} needs the least memory, {needed} of the "
        f"{format_bytes(nearest.prediction.device_bytes)} of a GPU ({machine.device})",
        where="--gpus, --machine",
        fix="more GPUs, a machine with more memory, a shorter data.sequence_length, or strategy.offload=optimizer",
    )


COLUMNS = ("", "GPUs", "layout", "batches", "recompute", "memory", "step", "MFU", "time", "GPU-hours")
WHY = "more than the row above"


def _print(rows: Sequence[Row], machine: Machine, line: CommandLine, compared: int) -> None:
    columns = [*COLUMNS, *(["cost"] if rows[0].price is not None else []), WHY]
    above = [None, *rows]
    cells = [[*_cells(number, row), _why_slower(row, above[number])] for number, row in enumerate(rows)]
    console = wide(Console())
    console.print(f"{compared} layouts on {machine.name} ({machine.device}), the best first:", highlight=False)
    console.print(text_table(columns, cells, numbers={*columns} - {"layout", "recompute", WHY}, folded={WHY}))
    for text in (f"1: {_command(rows[0], line)}", _origin(machine)):
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
    longer = {text: getattr(row.prediction, name) - getattr(above.prediction, name) for name, text in PARTS.items()}
    part = max(longer, key=lambda name: longer[name])
    if longer[part] < NOISE / 10 * above.prediction.step_s:
        return "equally fast, more techniques"
    return f"{part} +{longer[part]:.2g} s"


def _command(row: Row, line: CommandLine) -> str:
    """Returns the command that trains with the layout of ``row``."""
    kept = _keys(line)
    chosen = [f"{key}={value}" for key, value in row.candidate.values.items() if key not in kept]
    base = [] if any(override.lstrip("+").startswith("strategy=") for override in line.overrides) else ["+strategy=dp"]
    nodes = [f"cluster.nodes={row.candidate.nodes}"]
    return shlex.join(["python", "-m", "hpc_train", *line.overrides, *base, *chosen, *nodes, "-m"])


def _keys(line: CommandLine) -> set[str]:
    """Returns the keys that the overrides set."""
    return {override.partition("=")[0].lstrip("+") for override in line.overrides}


def _origin(machine: Machine) -> str:
    """Returns how many numbers of the machine were measured."""
    kinds = [figure.kind for figure in machine.figures.values()]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    return f"numbers of the machine: {counts}; not modelled: reading of data, saves, evaluations, slow nodes"


def _as_json(row: Row, line: CommandLine) -> dict[str, Any]:
    prediction, memory = row.prediction, row.prediction.memory
    return {
        "gpus": row.candidate.devices,
        "nodes": row.candidate.nodes,
        "layout": str(row.candidate.layout),
        "settings": dict(row.candidate.values),
        "step_s": prediction.step_s,
        "parts_s": {text: getattr(prediction, name) for name, text in PARTS.items()},
        "memory_bytes": prediction.needed_bytes,
        "memory_parts": None if memory is None else vars(memory),
        "device_bytes": prediction.device_bytes,
        "samples_per_s": prediction.samples_per_s,
        "tokens_per_s": prediction.tokens_per_s,
        "mfu": prediction.mfu,
        "seconds": row.seconds,
        "gpu_hours": row.gpu_hours,
        "cost": row.cost,
        "command": _command(row, line),
    }
