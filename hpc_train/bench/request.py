"""Defines the requests and results that a benchmark and its workers exchange, and their statistics. Imports no
torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Self

from hpc_train.config.extensions import from_plain
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import write_json

REQUEST = "bench-request.json"
PROGRESS = "bench-progress.json"
RESULT = "bench-result.json"


@dataclass(frozen=True)
class WorkerRequest:
    """Passes a request to the workers through a file in the run directory; by itself it requests the preflight."""

    def write(self, run: RunDirectory) -> None:
        write_json(run.path / REQUEST, asdict(self))

    @classmethod
    def read(cls, run: RunDirectory) -> Self:
        return from_plain(cls, run.json(run.path / REQUEST))


@dataclass(frozen=True)
class StepRequest(WorkerRequest):
    """Requests ``pairs`` blocks of ``steps`` steps, alternating with the bare loop ``raw`` if ``raw`` is not None.
    ``profile_gap`` states whether to profile what the step loses against the peak rate."""

    steps: int
    pairs: int
    warmup: int
    raw: str | None
    profile_gap: bool = False


@dataclass(frozen=True)
class CheckpointRequest(WorkerRequest):
    """Requests ``rounds`` rounds with each kind of save and load."""

    rounds: int


@dataclass(frozen=True)
class CollectivesRequest(WorkerRequest):
    """Requests collectives at ``sizes`` bytes, for about ``seconds`` each; all ``operations`` if it is empty."""

    sizes: Sequence[int]
    seconds: float
    operations: Sequence[str] = ()


@dataclass(frozen=True)
class NoiseRequest(WorkerRequest):
    """Requests ``estimates`` of the gradient noise, each from ``times`` global batches and from their union."""

    estimates: int
    times: int


@dataclass(frozen=True)
class MachineRequest(WorkerRequest):
    """Requests the numbers of a machine file, for about ``seconds`` each."""

    seconds: float


def write_progress(run: RunDirectory, done: int, of: int) -> None:
    write_json(run.path / PROGRESS, {"done": done, "of": of})


def read_progress(run: RunDirectory) -> tuple[int, int] | None:
    """Returns the number of measured blocks and the total number of blocks, or None before the first block."""
    path = run.path / PROGRESS
    if not path.exists():
        return None
    value = run.json(path)
    return value["done"], value["of"]


def write_result(run: RunDirectory, result: dict[str, Any]) -> None:
    write_json(run.path / RESULT, result)


def read_result(run: RunDirectory) -> dict[str, Any]:
    return run.json(run.path / RESULT)


@dataclass(frozen=True)
class Spread:
    """Holds the median of measurements with their 5 % and 95 % quantiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        ordered = sorted(values)
        return cls(median(ordered), _quantile(ordered, 0.05), _quantile(ordered, 0.95))

    def as_quantiles(self) -> dict[str, float]:
        return {"median": self.median, "p05": self.low, "p95": self.high}


def paired_ratio(first: Sequence[float], second: Sequence[float], resamples: int = 5000, seed: int = 0) -> Spread:
    """Returns the median of ``first[i] / second[i]`` with its bootstrap 95 % interval as ``low`` and ``high``.

    The two values of a pair are measured in succession, so a temporary slowdown of the machine affects both and cancels
    in the ratio. The interval is the percentile bootstrap (Efron 1979) over pairs.
    """
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    draw = random.Random(seed)
    medians = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(resamples))
    return Spread(median(ratios), _quantile(medians, 0.025), _quantile(medians, 0.975))


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Returns a quantile with linear interpolation."""
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])
