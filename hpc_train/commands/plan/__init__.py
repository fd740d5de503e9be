"""``python -m hpc_train plan [overrides]`` predicts time, memory and cost of training for each layout that fits."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hpc_train.commands.plan.output import (
    SCALING_KINDS,
    print_commands,
    print_parts,
    print_table,
    row_as_json,
    simulate,
    simulated_counts,
)
from hpc_train.commands.plan.rows import (
    ORDERS,
    ROWS,
    PlannedTraining,
    Row,
    Search,
    in_time,
    strategy_key,
    total_steps,
    unknown_end,
    with_starts,
    without_auto,
)
from hpc_train.config.arguments import with_right_plus
from hpc_train.config.command_line import CommandLine
from hpc_train.config.options import OptionParser
from hpc_train.config.schema import Config
from hpc_train.errors import UserError, nearest
from hpc_train.planner.candidates import COMPILE, FURTHER, with_values
from hpc_train.planner.faster import predicted_notes
from hpc_train.planner.machine import (
    NAMES,
    OF_CPUS,
    Figure,
    Machine,
    check_figure,
    machine_of_job,
    read_machine,
    shipped,
)
from hpc_train.planner.passes import why_not_predicted
from hpc_train.planner.prediction import ROOM
from hpc_train.run.exits import Exit
from hpc_train.runs.cost import Prices

_PRICE = re.compile(r"(\d+(?:\.\d+)?)\s*([^\s\d.,-]{0,5})")
_WITHIN = re.compile(r"(\d+(?:\.\d+)?)([mhd])")
_GPUS = re.compile(r"\d+(\.\.\d+)?(,\d+(\.\.\d+)?)*")
_SECONDS = {"m": 60, "h": 3600, "d": 86400}
_MOST_GPUS = 512  # the largest number that a plan with a deadline compares by default
_DEFAULT_GPUS = 8
_DEFAULT_MACHINE = "h100"


def main(arguments: list[str]) -> int:
    """Prints the table.

    Raises:
        UserError: the config is wrong, the machine is unknown, no layout fits, or none is done in time.
    """
    options = _parser().parse_intermixed_args(arguments)
    directory = [] if options.config_dir is None else ["-cd", options.config_dir]
    line = without_auto(CommandLine.parse(with_right_plus([*options.overrides, *directory])))
    strategy = strategy_key(line)  # composes, so not within another composition
    with line.composer() as compose:
        training = PlannedTraining(line, compose, strategy)
        config = training.config
        machine = with_figures(machine_of(options, config, training.fixed), options)
        gpus = gpus_of(options, machine)
        if options.simulate is not None:
            return simulate(training, machine, gpus, options)
        has_end = total_steps(config) is not None
        if options.deadline is not None and not has_end:
            raise unknown_end()
        sort = options.sort or ("time" if options.deadline is None else "gpus")
        prices = prices_of(options, config)
        proposes = not (machine.rates.cores or config.train.compile or COMPILE in training.fixed)
        also = options.also | ({COMPILE} if proposes else set())
        search = Search(machine, gpus, prices, options.rows, sort, also)
        notes: list[str] = []
        if options.largest:
            rows, compared = _largest(training, search, options.deadline, notes)
        else:
            rows, compared = search.find(training)
            if config.cluster.kind == "slurm":
                rows, notes = with_starts(rows, config, sort)
            if options.deadline is not None:
                rows = in_time(rows, options.deadline)
        notes += filter(None, [why_not_predicted(config, machine)])
        tight = [str(number) for number, row in enumerate(rows, 1) if not row.prediction.has_room]
        if tight:
            notes.append(f"more than {ROOM:.0%} of the memory, may run out of it: row {', '.join(tight)}")
        if not has_end:
            notes.append("the time to the end is unknown, since the length of the data determines it: set train.steps")
        learned = search.calibration(config)
        slow: list[str] = []
        if not options.largest:
            first = rows[0].candidate
            planned = with_values(config, first.values)
            slow += predicted_notes(planned, first.layout, machine, first.nodes, first.devices // first.nodes)
        if options.json:
            more = {"calibration": learned.as_json(), "queue": notes, "slow": slow}
            json.dump([row_as_json(row, machine) | more for row in rows], sys.stdout, indent=1)
            print()
            return Exit.DONE
        print_table(rows, machine, compared)
        print_parts(rows[0])
        print_commands(rows, machine)
        if rows[0].gpu_hours:
            notes += prices.compared(rows[0].gpu_hours)
        for text in filter(None, [str(learned), *notes, *slow]):
            print(text)
    return Exit.DONE


def _largest(
    training: PlannedTraining, search: Search, deadline: float | None, notes: list[str]
) -> tuple[list[Row], int]:
    """Returns the best row of each model of the same kind that fits and is done in time, the largest model first.

    Raises:
        UserError: no model fits and is done in time.
    """
    best: list[Row] = []
    compared = 0
    refusals: dict[str, UserError] = {}
    for model in training.with_models():
        try:
            rows, count = search.find(model)
            compared += count
            if deadline is not None:
                rows = in_time(rows, deadline)
            best.append(rows[0])
        except UserError as error:
            refusals[model.model] = error
    if not best:
        none = UserError("no model is of this kind", where="--largest", fix="model=gpt_tiny")
        raise next(iter(refusals.values()), none)
    notes += [f"not {name}: {error.what}" for name, error in refusals.items()]
    best.sort(key=lambda row: row.training.parameters or 0, reverse=True)
    return best[: search.rows], compared


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="python -m hpc_train plan",
        description="Predicts the time of a step, the memory, the time to the end and the cost of training for each "
        "layout that fits a machine, the fastest first. Keys that are set stay as they are; the other keys of the "
        "layout, the micro-batch and activation checkpointing are chosen.",
    )
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="config overrides, as for training")
    parser.add_argument("-cd", "--config-dir", metavar="DIR", help="a directory with your own config groups")
    parser.add_argument(
        "--gpus",
        type=_counts,
        metavar="N[,N...]|N..M",
        help=f"numbers of GPUs to compare (default: {_DEFAULT_GPUS}, on CPUs one node; with --within up to "
        f"{_MOST_GPUS})",
    )
    parser.add_argument(
        "--machine",
        metavar="NAME|FILE",
        help=f"{', '.join(shipped())}, or your machine file (default: cluster.machine, the machine of "
        f"the GPUs of the config, or {_DEFAULT_MACHINE})",
    )
    parser.add_argument(
        "--price", type=_price, metavar="X[EUR]", help="the price of a GPU-hour (default: cluster.price)"
    )
    parser.add_argument(
        "--within", type=_within, dest="deadline", metavar="TIME", help="only layouts that are done in 30m, 24h or 7d"
    )
    parser.add_argument("--largest", action="store_true", help="compare all models of the same kind, the largest first")
    parser.add_argument(
        "--also", type=_also, default=frozenset(), metavar="KEY[,KEY...]", help=f"also compare {', '.join(FURTHER)}"
    )
    parser.add_argument("--sort", choices=ORDERS, help="sort by this value (default: time; with a deadline, gpus)")
    parser.add_argument(
        "--rows", type=_row_count, default=ROWS, metavar="N", help=f"rows of the table (default: {ROWS})"
    )
    parser.add_argument(
        "--figure",
        type=_figure,
        action="append",
        default=[],
        metavar="NAME=X",
        help="override a number in the machine file",
    )
    simulation = parser.add_argument_group("how training scales")
    simulation.add_argument(
        "--simulate",
        nargs="?",
        choices=SCALING_KINDS,
        const=SCALING_KINDS[0],
        help="simulate up to 10,000 GPUs with failures; weak: the batch grows with the GPUs, strong: it does not",
    )
    simulation.add_argument("--failures", type=_positive, metavar="X", help="failures per GPU-hour")
    simulation.add_argument(
        "--storage", type=_positive, default=100.0, metavar="GB/S", help="bandwidth of the file system (default: 100)"
    )
    simulation.add_argument("-o", "--out", type=Path, metavar="FILE", help="draw a .png, .svg or .pdf")
    parser.add_argument("--json", action="store_true", help="print one JSON object per row")
    return parser


def gpus_of(options: argparse.Namespace, machine: Machine) -> list[int]:
    """Returns the numbers of GPUs to compare. Raises UserError if a range has no number that fills nodes."""
    per_node = machine.devices_per_node
    counts: list[int] = [per_node if machine.rates.cores else _DEFAULT_GPUS]
    if options.gpus is not None:
        counts = sorted({count for first, last in options.gpus for count in _between(first, last, per_node)})
    elif options.simulate is not None:
        counts = simulated_counts(machine)
    elif options.deadline is not None:
        most = per_node if machine.rates.cores else _MOST_GPUS
        counts = _between(1, most, per_node)
    if not counts:
        what = f"no number of --gpus fills nodes of {per_node}"
        raise UserError(what, where="--gpus", fix=f"a range with a multiple of {per_node}")
    return counts


def _between(first: int, last: int, per_node: int) -> list[int]:
    """Returns the ends of a range, the powers of two and 1.5 times the powers of two in it, without numbers that do not
    fill whole nodes; one number is returned whatever it fills."""
    if first == last:
        return [first]
    powers = [1 << power for power in range(last.bit_length())]
    counts = {first, last, *powers, *(size * 3 // 2 for size in powers)}
    return sorted(count for count in counts if first <= count <= last and (count <= per_node or count % per_node == 0))


def machine_of(options: argparse.Namespace, config: Config, fixed: Collection[str]) -> Machine:
    """Returns the machine file of ``--machine``, else the file for the GPUs of the config, else the default file.

    If the user has set ``cluster.cpu_workers`` (it is among the ``fixed`` keys), it is the number of ranks of a CPU
    node, and it requests CPUs unless a key requests GPUs.

    Raises:
        UserError: no machine file, or more than one, describes the GPUs.
    """
    cluster = config.cluster
    sets_ranks = "cluster.cpu_workers" in fixed
    if options.machine is not None:
        machine = read_machine(str(options.machine))
    elif cluster.machine == "auto" and cluster.gpu_type is None and cluster.gpus_per_node != 0:
        on_cpus = sets_ranks and cluster.gpus_per_node == "auto"
        machine = read_machine(OF_CPUS if on_cpus else _DEFAULT_MACHINE)
    else:
        types = [cluster.gpu_type] if cluster.gpu_type is not None else []
        machine = machine_of_job(cluster.machine, int(cluster.gpus_per_node != 0), types)
    if sets_ranks and machine.rates.cores:
        machine = machine.with_devices(cluster.cpu_workers)
    return machine


def prices_of(options: argparse.Namespace, config: Config) -> Prices:
    """Returns the prices. Raises UserError if the rows are to be sorted by cost and no price is known."""
    prices = Prices.of_config(config.cluster.price)
    if options.price is not None:
        amount, currency = options.price
        prices = replace(prices, per_gpu_hour=amount, currency=currency or prices.currency)
    if options.sort == "cost" and prices.gpu_hour is None:
        raise UserError(
            "the cost is unknown without a price",
            where="--sort",
            fix="--price 2.5EUR, or cluster.price.per_gpu_hour, or cluster.price.purchase for purchased GPUs",
        )
    return prices


def with_figures(machine: Machine, options: argparse.Namespace) -> Machine:
    """Returns the machine with the numbers that ``--figure`` gives. Raises UserError if one is unknown or wrong."""
    given = dict(options.figure)
    for name, value in given.items():
        if name not in machine.figures:
            raise UserError(f"the machine has no number {name}", where="--figure", fix=nearest(name, NAMES))
        check_figure(name, value, "--figure")
    replaced = {name: Figure(value, "assumed", "--figure") for name, value in given.items()}
    return replace(machine, figures={**machine.figures, **replaced})


def _figure(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    with suppress(ValueError):
        return name, float(value)
    raise argparse.ArgumentTypeError(f"{text!r} is not NAME=X with a number X")


def _positive(text: str) -> float:
    with suppress(ValueError):
        value = float(text)
        if 0 < value < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")


def _row_count(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of rows")


def _counts(text: str) -> list[tuple[int, int]]:
    """Returns the ranges in ``8,16..64``; a number is a range of one."""
    if not _GPUS.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text} is not a number of GPUs, several such as 8,16, or a range 8..64")
    ranges: list[tuple[int, int]] = []
    for part in text.split(","):
        first, _, last = part.partition("..")
        ranges.append((int(first), int(last or first)))
    for least, most in ranges:
        if least < 1:
            raise argparse.ArgumentTypeError(f"{least} is not a number of GPUs")
        if least > most:
            raise argparse.ArgumentTypeError(f"the range {least}..{most} is empty")
    return ranges


def _price(text: str) -> tuple[float, str]:
    match = _PRICE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text} is not a price, such as 2.5 or 2.5EUR")
    return float(match[1]), match[2]


def _within(text: str) -> float:
    match = _WITHIN.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text} is not a time, such as 30m, 24h or 7d")
    return time.time() + float(match[1]) * _SECONDS[match[2]]


def _also(text: str) -> frozenset[str]:
    names = frozenset(name if "." in name else f"strategy.{name}" for name in text.split(","))
    for name in sorted(names - {*FURTHER}):
        raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(FURTHER)}")
    return names
