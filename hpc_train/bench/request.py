"""Defines the requests and results that a benchmark and its workers exchange, and their statistics; without torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Self

from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import write_json

REQUEST, PROGRESS, RESULT = "bench-request.json", "bench-progress.json", "bench-result.json"


@dataclass(frozen=True)
class WorkerRequest:
    """Passes a request to the workers through a file in the run directory."""

    def write(self, run: RunDirectory) -> None:
        write_json(run.path / REQUEST, asdict(self))

    @classmethod
    def read(cls, run: RunDirectory) -> Self:
        return cls(**run.json(run.path / REQUEST))


@dataclass(frozen=True)
class StepRequest(WorkerRequest):
    """Requests ``pairs`` blocks of ``steps`` steps, alternating with the bare loop ``raw`` if that is not None.

    Attributes:
        profile_gap: whether a profile names what the step loses against the peak rate.
    """

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
    """Requests each collective at ``sizes`` bytes, for about ``seconds`` each."""

    sizes: tuple[int, ...]
    seconds: float

    @classmethod
    def read(cls, run: RunDirectory) -> CollectivesRequest:
        value = run.json(run.path / REQUEST)
        return cls(tuple(value["sizes"]), value["seconds"])


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
    """Returns the number of measured blocks and of all blocks; None before the first."""
    path = run.path / PROGRESS
    if not path.exists():
        return None
    value = run.json(path)
    return value["done"], value["of"]


def write_result(run: RunDirectory, result: dict[str, Any]) -> None:
    write_json(run.path / RESULT, result)


def read_result(run: RunDirectory) -> dict[str, Any]:
    return run.json(run.path / RESULT)


BARE_REPLICAS = {"ddp": "dp", "zero2": "zero2", "zero3": "zero3"}  # kind -> its loop in ``bare_loop.py``
BARE_PIPELINES = {"1f1b": "pp", "interleaved_1f1b": "pp"}  # and for each pipeline schedule


def bare_loop(config: Config, layout: Layout) -> str:
    """Returns the kind of bare loop (see ``bare_loop.py``) that is equivalent to ``config`` in ``layout``.

    Raises:
        UserError: there is no equivalent bare loop.
    """
    if config.precision.name == "fp16":
        raise UserError(
            "precision=fp16 needs loss scaling, which the bare loops do not have",
            where="precision, --against",
            fix="precision=bf16 or precision=fp32, or drop --against",
        )
    if layout.pp > 1 and getattr(config.data, "packing", False):
        raise UserError(
            "the bare pipeline loop does not support data.packing=true",
            where="data.packing, --against",
            fix="data.packing=false, or drop --against",
        )
    if layout.pp > 1 and config.train.loss_chunks not in (1, "auto"):
        raise UserError(
            "the bare pipeline loop computes the loss in one piece",
            where="train.loss_chunks, --against",
            fix="train.loss_chunks=1, or drop --against",
        )
    if layout.world_size == 1:
        return "single"
    if layout.dp == layout.world_size and layout.shard in (1, layout.dp) and layout.data_parallel in BARE_REPLICAS:
        return BARE_REPLICAS[layout.data_parallel]
    if layout.pp == layout.world_size and layout.schedule in BARE_PIPELINES:
        return BARE_PIPELINES[layout.schedule]
    raise UserError(
        f"there is no bare loop for {layout}",
        where="strategy, --against",
        fix="+strategy=single, dp, zero2, zero3, or pp with schedule 1f1b or interleaved_1f1b; or drop --against",
    )


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
