"""The rows of a plan: the best layouts, with what the whole training takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from hpc_train.commands.plan.asked import Asked
from hpc_train.commands.plan.progress import shown
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.planner.calibration import Calibration, read_calibration
from hpc_train.planner.candidates import Candidate, candidates, distinct, fastest, refusal
from hpc_train.planner.machine import Machine
from hpc_train.planner.prediction import Prediction
from hpc_train.runs.cost import Prices
from hpc_train.schedulers.slurm.queue_estimate import Start
from hpc_train.units import format_bytes, format_duration

ROWS = 10
NOISE = 0.02  # layouts closer than this are equally fast; the simplest of them is first
ORDERS = ("time", "gpus", "gpu-hours", "cost")
_OFFLOAD = "strategy.offload"


@dataclass(frozen=True)
class Row:
    """A layout with what the whole training takes; None where the number of steps is unknown.

    Attributes:
        start: in the queue; None for a config that does not submit to Slurm.
    """

    asked: Asked
    candidate: Candidate
    prices: Prices
    start: Start | None = None

    @property
    def prediction(self) -> Prediction:
        return self.candidate.prediction

    @property
    def seconds(self) -> float | None:
        steps = total_steps(self.asked.config)
        return None if steps is None else steps * self.prediction.step_s

    @property
    def refused(self) -> bool:
        """Tells whether Slurm refuses the job."""
        return self.start is not None and bool(self.start.refusal)

    @property
    def done(self) -> float | None:
        """When the training is done, in seconds since 1970, if a job that is requeued starts again at once."""
        start = None if self.start is None else self.start.at
        return None if start is None or self.seconds is None else start + self.seconds

    @property
    def gpu_hours(self) -> float | None:
        return None if self.seconds is None else self.seconds * self.candidate.devices / 3600

    @property
    def cost(self) -> float | None:
        price = self.prices.gpu_hour
        return None if self.gpu_hours is None or price is None else self.gpu_hours * price


def total_steps(config: Config) -> int | None:
    """Returns the number of steps; None if it follows from the length of the data."""
    return config.train.steps if config.train.epochs is None else None


@dataclass(frozen=True)
class Search:
    """Finds the rows of a plan.

    Attributes:
        rows: how many rows the table has at most, if each number of GPUs has one.
        sort: one of ``ORDERS``.
        also: further keys whose values are compared.
    """

    machine: Machine
    gpus: Sequence[int]
    prices: Prices
    rows: int
    sort: str
    also: frozenset[str]

    def calibration(self, config: Config) -> Calibration:
        return read_calibration(Path(config.run.root), config, self.machine)

    def find(self, asked: Asked) -> tuple[list[Row], int]:
        """Returns the best row first, of each number of GPUs as many rows, and how many layouts were compared.

        The optimizer state is offloaded only if nothing fits without it, unless ``also`` or the user names the key.

        Raises:
            UserError: no layout is possible, or none fits.
        """
        found = self._candidates(asked, self.also)
        if found and not any(each.prediction.fits for each in found) and _OFFLOAD not in {*asked.kept, *self.also}:
            found = self._candidates(asked, self.also | {_OFFLOAD})
        share = max(1, self.rows // len(self.gpus))
        best = [each for count in self.gpus for each in islice(distinct(fastest(_of(found, count), NOISE)), share)]
        if not best:
            raise _does_not_fit(found, self.machine) if found else self._impossible(asked)
        rows = [Row(asked, each, self.prices) for each in best]
        return self.ordered(rows), len(found)

    def ordered(self, rows: Sequence[Row]) -> list[Row]:
        """Returns the rows in the order of ``sort``."""
        if self.sort == "gpus":
            return sorted(rows, key=lambda row: (row.candidate.devices, row.prediction.step_s))
        held = self.sort in ("gpu-hours", "cost")  # of GPUs
        return sorted(rows, key=lambda row: row.prediction.step_s * (row.candidate.devices if held else 1))

    def _candidates(self, asked: Asked, also: frozenset[str]) -> list[Candidate]:
        learned = self.calibration(asked.config)
        return [
            replace(each, prediction=learned.corrected(each.prediction))
            for count in shown(self.gpus)
            for each in candidates(asked.config, self.machine, count, asked.kept, also)
        ]

    def _impossible(self, asked: Asked) -> UserError:
        """Returns why the keys that are set permit no layout on any number of GPUs."""
        per_node = self.machine.devices_per_node
        places = [(max(1, count // per_node), min(count, per_node)) for count in self.gpus]
        refused = (refusal(asked.config, *place, asked.kept) for place in places)
        why = next((f": {error.what}" for error in refused if error is not None), "")
        return UserError(
            f"no layout is possible with these settings{why}",
            where="the command line",
            fix="set fewer keys of strategy and batch, or give another number of --gpus",
        )


def _of(found: Sequence[Candidate], devices: int) -> list[Candidate]:
    return [each for each in found if each.devices == devices]


def nearest(found: Sequence[Candidate]) -> Candidate:
    """Returns the first of the candidates that need the least memory."""
    least = found[0]
    for each in found[1:]:
        if not each.prediction.needs_more_than(least.prediction):
            least = min(least, each, key=lambda one: one.prediction.needed_bytes)
    return least


def _does_not_fit(found: Sequence[Candidate], machine: Machine) -> UserError:
    least = nearest(found)
    needed = format_bytes(least.prediction.needed_bytes)
    offloads = least.values.get(_OFFLOAD, "none") != "none"
    return UserError(
        f"no layout fits: {least.layout}{' with its optimizer state in host memory' if offloads else ''} needs the "
        f"least memory, {needed} of the {format_bytes(least.prediction.device_bytes)} of a GPU ({machine.device})",
        where="--gpus, --machine",
        fix="more GPUs, a machine with more memory, or a shorter data.sequence_length",
    )


def unknown_end() -> UserError:
    """Returns the error for a deadline that cannot be compared with the end of the training."""
    return UserError(
        "plan cannot tell when the training is done: its number of steps, or its start, is unknown",
        where="train.epochs, --within",
        fix="train.steps=N instead of train.epochs, and a queue that responds",
    )


def in_time(rows: Sequence[Row], deadline: float) -> list[Row]:
    """Returns the rows that are done by ``deadline``, in seconds since 1970; without a queue they start now.

    Raises:
        UserError: none is done by then, or the number of steps is unknown.
    """
    ends = [_end(row) for row in rows]
    if all(end is None for end in ends):
        raise unknown_end()
    kept = [row for row, end in zip(rows, ends, strict=True) if end is not None and end <= deadline]
    if kept:
        return kept
    end, first = min((end, number) for number, end in enumerate(ends) if end is not None)
    row = rows[first]
    late = format_duration(end - deadline)
    raise UserError(
        f"no layout is done in time: the fastest, {row.candidate.layout} on {row.candidate.devices} GPUs, takes "
        f"{format_duration(row.seconds or 0)} and is done {late} later",
        where="--by, --within",
        fix="more --gpus, fewer train.steps, or a later time",
    )


def _end(row: Row) -> float | None:
    if row.start is not None or row.seconds is None:
        return row.done
    return time.time() + row.seconds
