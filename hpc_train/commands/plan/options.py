"""The options of ``plan``."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_train.commands.plan.rows import ORDERS, ROWS
from hpc_train.commands.plan.simulated import KINDS, simulated_counts
from hpc_train.config.schema import Config
from hpc_train.errors import UserError, nearest
from hpc_train.planner.candidates import FURTHER
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
from hpc_train.runs.cost import Prices

_PRICE = re.compile(r"(\d+(?:\.\d+)?)\s*([^\s\d.,-]{0,5})")
_WITHIN = re.compile(r"(\d+(?:\.\d+)?)([mhd])")
_GPUS = re.compile(r"\d+(\.\.\d+)?(,\d+(\.\.\d+)?)*")
_SECONDS = {"m": 60, "h": 3600, "d": 86400}
_MOST_GPUS = 512  # that a plan with a deadline compares
_DEFAULT_GPUS = 8
_DEFAULT_MACHINE = "h100"


@dataclass(frozen=True)
class GpuCounts:
    """Numbers of GPUs, and ranges of them, in which only numbers that fill whole nodes count."""

    counts: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...] = ()

    def on(self, machine: Machine) -> list[int]:
        """Returns the numbers, of each range its ends, the powers of two and their multiples by 1.5."""
        per_node = machine.devices_per_node
        between = {
            count
            for first, last in self.ranges
            for count in (first, last, *_steps(last))
            if first <= count <= last and (count <= per_node or count % per_node == 0)
        }
        return sorted({*self.counts, *between})


def _steps(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield from (size, size * 3 // 2)
        size *= 2


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m hpc_train plan",
        description="Predicts the time of a step, the memory, the time to the end and the cost of a training for each "
        "layout that fits a machine, the fastest first. Keys that are set stay as they are; the other keys of the "
        "layout, the micro-batch and activation checkpointing are chosen.",
    )
    found.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="config overrides, as for training")
    found.add_argument("-cd", "--config-dir", metavar="DIR", help="a directory with your own config groups")
    found.add_argument(
        "--gpus",
        type=_counts,
        metavar="N[,N...]|N..M",
        help=f"numbers of GPUs to compare (default: {_DEFAULT_GPUS}, on CPUs one node; with --within up to "
        f"{_MOST_GPUS})",
    )
    found.add_argument(
        "--machine",
        metavar="NAME|FILE",
        help=f"{', '.join(shipped())}, or your machine file (default: cluster.machine, that of the GPUs "
        f"of the config, or {_DEFAULT_MACHINE})",
    )
    found.add_argument(
        "--price", type=_price, metavar="X[EUR]", help="the price of a GPU-hour (default: cluster.price)"
    )
    found.add_argument(
        "--within", type=_within, dest="deadline", metavar="TIME", help="only layouts that are done in 30m, 24h or 7d"
    )
    found.add_argument("--largest", action="store_true", help="compare all models of the same kind, the largest first")
    found.add_argument(
        "--also", type=_also, default=frozenset(), metavar="KEY[,KEY...]", help=f"also compare {', '.join(FURTHER)}"
    )
    found.add_argument(
        "--sort", choices=ORDERS, help="what the first row needs least of (default: time, with a deadline gpus)"
    )
    found.add_argument(
        "--rows", type=_row_count, default=ROWS, metavar="N", help=f"rows of the table (default: {ROWS})"
    )
    found.add_argument(
        "--figure", type=_figure, action="append", default=[], metavar="NAME=X", help="another number of the machine"
    )
    simulation = found.add_argument_group("how the training scales")
    simulation.add_argument(
        "--simulate",
        nargs="?",
        choices=KINDS,
        const=KINDS[0],
        help="simulate up to 10,000 GPUs that fail: with weak scaling the batch grows with the GPUs, with strong not",
    )
    simulation.add_argument("--failures", type=_positive, metavar="X", help="failures per GPU-hour")
    simulation.add_argument(
        "--storage", type=_positive, default=100.0, metavar="GB/S", help="bandwidth of the file system (default: 100)"
    )
    simulation.add_argument("-o", "--out", type=Path, metavar="FILE", help="draw a .png, .svg or .pdf")
    found.add_argument("--json", action="store_true", help="print one JSON object per row")
    return found


def gpus_of(options: argparse.Namespace, machine: Machine) -> list[int]:
    """Returns the numbers of GPUs to compare. Raises UserError if a range has no number that fills nodes."""
    if options.gpus is not None:
        found: list[int] = options.gpus.on(machine)
    elif options.simulate is not None:
        return simulated_counts(machine)
    elif options.deadline is not None:
        found = GpuCounts((), ((1, _MOST_GPUS if not machine.rates.cores else machine.devices_per_node),)).on(machine)
    else:
        found = [machine.devices_per_node if machine.rates.cores else _DEFAULT_GPUS]
    if not found:
        per_node = machine.devices_per_node
        what = f"no number of --gpus fills nodes of {per_node}"
        raise UserError(what, where="--gpus", fix=f"a range with a multiple of {per_node}")
    return found


def machine_of(options: argparse.Namespace, config: Config, kept: Collection[str]) -> Machine:
    """Returns the machine file that is asked for, or that describes the GPUs of the config; else the default one.

    ``cluster.cpu_workers`` among the ``kept`` keys, which the user has set, is the number of ranks of a node of CPUs.
    It asks for CPUs if nothing asks for GPUs.

    Raises:
        UserError: no file, or more than one, describes them.
    """
    cluster, sets_ranks = config.cluster, "cluster.cpu_workers" in kept
    if options.machine is not None:
        found = read_machine(str(options.machine))
    elif cluster.machine == "auto" and cluster.gpu_type is None and cluster.gpus_per_node != 0:
        on_cpus = sets_ranks and cluster.gpus_per_node == "auto"
        found = read_machine(OF_CPUS if on_cpus else _DEFAULT_MACHINE)
    else:
        types = [] if cluster.gpu_type is None else [cluster.gpu_type]
        found = machine_of_job(cluster.machine, int(cluster.gpus_per_node != 0), types)
    return found.with_devices(cluster.cpu_workers) if sets_ranks and found.rates.cores else found


def prices_of(options: argparse.Namespace, config: Config) -> Prices:
    """Returns the prices. Raises UserError if the rows are to be sorted by cost and no price is known."""
    found = Prices.of_config(config.cluster.price)
    if options.price is not None:
        amount, currency = options.price
        found = replace(found, per_gpu_hour=amount, currency=currency or found.currency)
    if options.sort == "cost" and found.gpu_hour is None:
        raise UserError(
            "the cost is unknown without a price",
            where="--sort",
            fix="--price 2.5EUR, or cluster.price.per_gpu_hour, or cluster.price.purchase for purchased GPUs",
        )
    return found


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


def _counts(text: str) -> GpuCounts:
    if not _GPUS.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text} is not a number of GPUs, several such as 8,16, or a range 8..64")
    counts, ranges = list[int](), list[tuple[int, int]]()
    for part in text.split(","):
        first, dots, last = part.partition("..")
        if dots:
            ranges.append((int(first), int(last)))
        else:
            counts.append(int(part))
    smallest = min([*counts, *(first for first, _ in ranges)])
    if smallest < 1:
        raise argparse.ArgumentTypeError(f"{smallest} is not a number of GPUs")
    for least, most in ranges:
        if least > most:
            raise argparse.ArgumentTypeError(f"the range {least}..{most} is empty")
    return GpuCounts(tuple(counts), tuple(ranges))


def _price(text: str) -> tuple[float, str]:
    found = _PRICE.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text} is not a price, such as 2.5 or 2.5EUR")
    return float(found[1]), found[2]


def _within(text: str) -> float:
    found = _WITHIN.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text} is not a time, such as 30m, 24h or 7d")
    return time.time() + float(found[1]) * _SECONDS[found[2]]


def _also(text: str) -> frozenset[str]:
    names = frozenset(name if "." in name else f"strategy.{name}" for name in text.split(","))
    for name in sorted(names - {*FURTHER}):
        raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(FURTHER)}")
    return names
