"""Extrapolates a training to many devices: speed-up, failures, the interval of checkpoints, and the time to the end.

The speed of many devices follows from the step time and the share of the time that failures and saves leave. Each value
is an interval: the step time has the errors that published measurements show, and the rates of failures are the
published ones of the most and the least reliable clusters. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from hpc_train.checkpoint.failures import (
    LLAMA_3,
    RECOVERY_S,
    RSC_1,
    RSC_2,
    Saves,
    best_interval,
    between_failures,
    shares,
)
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.layout.memory import state_bytes
from hpc_train.planner.candidates import Candidate, candidates, fastest, with_values
from hpc_train.planner.machine import Machine

EQUAL = 0.02  # layouts closer than this are equally fast
# Measured by predicted step times up to so many GPUs: the quantiles of 10 % and 90 % of the published rows that
# docs/measurements/plan.md compares. No published row is of more than 1,024 GPUs.
ERRORS = ((64, 0.94, 1.14), (256, 0.94, 1.20), (1024, 0.95, 1.41))
MOST_COMPARED = ERRORS[-1][0]
AGREE_S = 1.0  # seconds that a save blocks in addition to the copy; an estimate
RATES = (RSC_2.per_gpu_hour, LLAMA_3.per_gpu_hour, RSC_1.per_gpu_hour)


@dataclass(frozen=True)
class Range:
    """Holds a value and the ends of its interval."""

    low: float
    middle: float
    high: float

    def times(self, other: Range) -> Range:
        return Range(self.low * other.low, self.middle * other.middle, self.high * other.high)

    def inverse(self, numerator: float) -> Range:
        return Range(numerator / self.high, numerator / self.middle, numerator / self.low)


@dataclass(frozen=True)
class Assumed:
    """Holds what is assumed about failures and the file system.

    Attributes:
        failures_per_gpu_hour: from few to many.
        storage_bytes_per_s: the bandwidth of the file system for all nodes together.
        grows: whether the global batch grows with the devices (weak scaling) or stays constant (strong scaling).
    """

    failures_per_gpu_hour: tuple[float, float, float]
    storage_bytes_per_s: float
    grows: bool


@dataclass(frozen=True)
class Point:
    """Describes the training on one number of devices.

    Attributes:
        batch: samples of a step. step_s: seconds of a step. failures_per_day: of the whole training. save_every_s: the
        best interval of checkpoints at the middle rate of failures. useful: the share of the time in steps whose work
        is kept. samples_per_s: samples per second at this share. speedup: ``samples_per_s`` relative to the first
        point, both at the middle of their intervals. efficiency: ``speedup`` divided by the growth of the number of
        devices. seconds: of the whole training; None if its number of steps is unknown.
    """

    candidate: Candidate
    batch: int
    step_s: Range
    failures_per_day: Range
    save_every_s: float
    useful: Range
    samples_per_s: Range
    speedup: float
    efficiency: float
    seconds: Range | None


def scale(
    config: Config,
    machine: Machine,
    counts: Iterable[int],
    fixed: Collection[str],
    assumed: Assumed,
    also: Collection[str] = (),
) -> Iterator[Point]:
    """Yields a point for each number of devices on which the training fits, with its fastest layout. The config keys in
    ``fixed`` keep their values. Raises UserError if the training fits on none of the numbers."""
    samples = None
    if config.train.epochs is None and config.train.steps is not None:
        samples = config.train.steps * config.batch.global_size
    first: tuple[int, float] | None = None
    compared = list[int]()
    for count in counts:
        compared.append(count)
        if assumed.grows:
            batch = config.batch.global_size * count // compared[0]
        else:
            batch = config.batch.global_size
        values = {"batch.global_size": batch}
        synthetic = getattr(config.data, "samples", None)
        if isinstance(synthetic, int):
            values["data.samples"] = max(batch, synthetic)  # at least the duration of a step
        scaled = with_values(config, values)
        best = next(fastest(candidates(scaled, machine, count, fixed, also), EQUAL), None)
        if best is None:
            continue
        predicted = best.prediction.step_s
        low, high = next(((low, high) for most, low, high in ERRORS if best.devices <= most), ERRORS[-1][1:])
        step = Range(low * predicted, predicted, high * predicted)
        saves, between = _saves_and_failures(scaled, machine, best, assumed)
        useful = Range(*(shares(saves, seconds).useful for seconds in reversed(between)))
        speed = step.inverse(batch).times(useful)
        first = first or (count, speed.middle)
        speedup = speed.middle / first[1]
        yield Point(
            candidate=best,
            batch=batch,
            step_s=step,
            failures_per_day=Range(*(86400 / seconds for seconds in between)),
            save_every_s=saves.every_s,
            useful=useful,
            samples_per_s=speed,
            speedup=speedup,
            efficiency=speedup * first[0] / count,
            seconds=None if samples is None else speed.inverse(samples),
        )
    if first is None:
        raise UserError(
            f"the training fits on none of {', '.join(map(str, compared))} devices ({machine.device})",
            where="--gpus, --machine",
            fix="a smaller batch.global_size or more --gpus; `plan` without --simulate says how much memory it needs",
        )


def _saves_and_failures(
    config: Config, machine: Machine, best: Candidate, assumed: Assumed
) -> tuple[Saves, list[float]]:
    """Returns the seconds of a save, and the seconds between failures, from few to many failures. A save blocks while
    ranks agree and copy their shares to host memory."""
    size = float(state_bytes(config) or 0)
    rates = machine.rates
    blocked = AGREE_S + size / best.devices / rates.host_bytes_per_s
    durable = blocked + size / assumed.storage_bytes_per_s
    every = best_interval(blocked, durable, assumed.failures_per_gpu_hour[1], best.devices)
    every = max(every, best.prediction.step_s)
    saves = Saves(every, blocked, durable, RECOVERY_S + size / assumed.storage_bytes_per_s)
    return saves, [between_failures(rate, best.devices) for rate in assumed.failures_per_gpu_hour]
