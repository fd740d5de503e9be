"""The rows of a plan: the best layouts, with what the whole training takes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from hpc_train.config.schema import Config
from hpc_train.planner.candidates import Candidate, distinct, fastest
from hpc_train.planner.prediction import Prediction
from hpc_train.slurm.queue_estimate import Start

ROWS = 10
NOISE = 0.02  # layouts closer than this are equally fast; the simplest of them is first
ORDERS = ("time", "gpu-hours")


@dataclass(frozen=True)
class Row:
    """A layout with what the whole training takes; None where the number of steps is unknown."""

    candidate: Candidate
    steps: int | None
    price: float | None
    start: Start | None = None  # in the queue; None for a config that does not submit to Slurm

    @property
    def prediction(self) -> Prediction:
        return self.candidate.prediction

    @property
    def seconds(self) -> float | None:
        return None if self.steps is None else self.steps * self.prediction.step_s

    @property
    def refused(self) -> bool:
        """Whether Slurm refuses the job."""
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
        return None if self.gpu_hours is None or self.price is None else self.gpu_hours * self.price


def rows_of(config: Config, found: Sequence[Candidate], options: argparse.Namespace) -> list[Row]:
    """Returns the best layout first: of each number of GPUs the same number of layouts, each technique once."""
    steps = config.train.steps if config.train.epochs is None else None
    share = max(1, options.rows // len(options.gpus))
    best = [each for devices in options.gpus for each in distinct(fastest(_of(found, devices), NOISE))[:share]]
    rows = [Row(each, steps, options.price) for each in best]
    by_devices = options.sort == "gpu-hours"
    return sorted(rows, key=lambda row: row.prediction.step_s * (row.candidate.devices if by_devices else 1))


def _of(found: Sequence[Candidate], devices: int) -> list[Candidate]:
    return [each for each in found if each.devices == devices]
