"""``python -m hpc_train plan [overrides]`` predicts time, memory and cost of a training for each layout that fits."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpc_train.commands.plan.chosen import keys_of
from hpc_train.commands.plan.printed import as_json, print_table
from hpc_train.commands.plan.rows import ORDERS, ROWS, rows_of
from hpc_train.config.arguments import CommandLine
from hpc_train.config.compose import typed
from hpc_train.errors import UserError
from hpc_train.planner.calibration import read_calibration
from hpc_train.planner.candidates import Candidate, candidates
from hpc_train.planner.machine import Machine, read_machine, shipped
from hpc_train.run.exits import Exit
from hpc_train.units import format_bytes


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
    kept = keys_of(line)
    calibration = read_calibration(Path(config.run.root), config, machine)
    found = [
        replace(each, prediction=calibration.corrected(each.prediction, machine))
        for devices in options.gpus
        for each in candidates(config, machine, devices, kept)
    ]
    rows, in_queue = rows_of(config, found, options), list[str]()
    if not rows:
        raise _does_not_fit(found, machine)
    if config.cluster.kind == "slurm":
        from hpc_train.commands.plan.queue import with_starts  # imports what submits jobs

        rows, in_queue = with_starts(rows, config, options.sort)
    if options.json:
        learned = {"calibration": calibration.as_json(), "queue": in_queue}
        json.dump([as_json(row, line) | learned for row in rows], sys.stdout, indent=1)
        print()
    else:
        print_table(rows, machine, line, len(found))
        for text in filter(None, [str(calibration), *in_queue]):
            print(text)
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
