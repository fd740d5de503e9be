"""Learns from finished runs by how much their steps and their memory differed from the prediction. Imports no torch.

At the end of a job, the agent of node 0 appends one line to ``calibration.jsonl`` in the run root: what was predicted
for the layout on the machine that the job ran on, and what was measured. The calibration is stored only in this file.
The file is in the run root because every job can write there and colleagues who share the root share the calibration,
and because the figures of a machine file then keep their sources.

Two numbers correct a part of the step: the median of measured / predicted over the newest runs on the same
machine with the same model family and precision, and its spread, the median absolute deviation of the logarithm. Half
of the runs lie within one spread of the median.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from hpc_train.config.schema import Config
from hpc_train.opening import DamagedFile, read_tail
from hpc_train.planner.machine import Machine
from hpc_train.planner.prediction import Prediction
from hpc_train.units import counted
from hpc_train.version import __version__

FILE = "calibration.jsonl"  # in the run root
NEWEST = 20  # runs that count
FEWEST = 3  # with fewer runs nothing is corrected
TAIL_BYTES = 1 << 21  # of the file that are read, about 4,000 runs
LEAST_SHARE = 0.05  # of the step, that a part must be predicted to take if its ratio is to say anything


@dataclass(frozen=True)
class Values:
    """Holds the time of a step and of its parts in seconds, and memory in bytes, either predicted or measured; None if
    unknown.

    Attributes:
        compute_s: computation with the update of the parameters.
        communication_s: traffic that computation waits for. Unknown for tensor parallelism, whose traffic the
            prediction counts as computation and the measurement as communication; then ``compute_s`` is unknown too.
        bubble_s: waiting for other pipeline stages.
        memory_bytes: peak memory of tensors on the rank that needs the most.
    """

    step_s: float
    compute_s: float | None = None
    communication_s: float | None = None
    bubble_s: float | None = None
    memory_bytes: float | None = None


PARTS = ("compute_s", "communication_s", "bubble_s")


def predicted_values(prediction: Prediction) -> Values:
    """Returns the values of ``prediction`` that a run can measure."""
    compute = communication = memory = None
    if prediction.layout.cp * prediction.layout.tp == 1:
        compute = prediction.compute_s + prediction.optimizer_s
        communication = prediction.communication_s
    if prediction.memory is not None:
        memory = prediction.memory.total
    return Values(
        step_s=prediction.step_s,
        compute_s=compute,
        communication_s=communication,
        bubble_s=prediction.bubble_s,
        memory_bytes=memory,
    )


def measured_values(lines: Sequence[Mapping[str, Any]], tp: int, on_gpu: bool) -> Values | None:
    """Returns the medians over lines of metrics of one attempt; None if there are fewer than three.

    The first line is left out, since its steps compile and allocate. Time spent waiting for data is left out too, since
    no prediction covers it. ``tp`` is cp x tp, the number of ranks that communicate inside layers. Without ``on_gpu``,
    the memory is left out, since on a CPU it includes the interpreter.
    """
    usable = [line for line in lines[1:] if _number(line.get("step_s"))]
    if len(usable) < 2:
        return None
    rows = [_measured(line, tp, on_gpu) for line in usable]
    measured = {name: [getattr(row, name) for row in rows] for name in (*PARTS, "memory_bytes")}
    medians = {name: median(values) if None not in values else None for name, values in measured.items()}
    return Values(median(row.step_s for row in rows), **medians)


def _measured(line: Mapping[str, Any], tp: int, on_gpu: bool) -> Values:
    step = line["step_s"]
    waited, communicated, idle = (
        step * line[key] if _number(line.get(key)) else None
        for key in ("data_wait_share", "comm_share", "bubble_share")
    )
    computing = step - (waited or 0.0)
    # one rank has no collectives, and one stage no bubble; compiled layers hide those of tensor parallelism
    if communicated is None and line.get("world_size") == 1:
        communicated = 0.0
    apart = tp == 1 and communicated is not None
    return Values(
        step_s=computing,
        compute_s=computing - (communicated or 0.0) - (idle or 0.0) if apart else None,
        communication_s=communicated if apart else None,
        bubble_s=idle or 0.0,
        memory_bytes=line.get("peak_memory_bytes") if on_gpu else None,
    )


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def key_of(config: Config, machine: Machine) -> dict[str, str]:
    """Returns what runs must share to be comparable: the machine with its figures, the model family and the precision.

    Figures that a user has corrected, or another version of hpc_train, lead to other predictions.
    """
    values = sorted((name, figure.value) for name, figure in machine.figures.items())
    figures = hashlib.sha256(json.dumps([__version__, values]).encode()).hexdigest()[:12]
    family = config.model.kind
    precision = "-".join(filter(None, (config.precision.name, config.precision.fp8)))
    return {"machine": machine.name, "figures": figures, "family": family, "precision": precision}


def as_line(key: Mapping[str, str], run: Path, layout: str, predicted: Values, measured: Values) -> dict[str, Any]:
    """Returns the line of a run in the file; a later line of the same run replaces it."""
    return {**key, "run": str(run), "layout": layout, "predicted": asdict(predicted), "measured": asdict(measured)}


@dataclass(frozen=True)
class Deviation:
    """Summarizes measured / predicted over several runs: its median, and the median absolute deviation of its
    logarithm."""

    runs: int
    factor: float
    spread: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Deviation:
        logs = [math.log(ratio) for ratio in ratios]
        middle = median(logs)
        return cls(len(logs), math.exp(middle), median(abs(log - middle) for log in logs))

    @property
    def is_known(self) -> bool:
        return self.runs >= FEWEST

    def __str__(self) -> str:
        if self.runs == 1:
            return f"{self.factor - 1:+.0%}"
        low, high = (self.factor * math.exp(sign * self.spread) - 1 for sign in (-1, 1))
        return f"{self.factor - 1:+.0%} in the median (half of them {low:+.0%} to {high:+.0%})"


@dataclass(frozen=True)
class Calibration:
    """Holds the measurements of the newest runs of one kind, the newest last.

    Attributes:
        pairs: predicted and measured values of each run.
    """

    machine: str
    family: str
    precision: str
    pairs: Sequence[tuple[Values, Values]]

    @cached_property
    def step(self) -> Deviation | None:
        return _deviation(self.pairs, "step_s")

    @cached_property
    def memory(self) -> Deviation | None:
        return _deviation(self.pairs, "memory_bytes")

    @cached_property
    def parts(self) -> dict[str, Deviation]:
        """Returns the deviations of the parts that enough runs have measured."""
        deviations = {name: _deviation(self.pairs, name) for name in PARTS}
        return {
            name: deviation for name, deviation in deviations.items() if deviation is not None and deviation.is_known
        }

    @cached_property
    def factors(self) -> dict[str, float]:
        """Returns the factor of each part that makes the median error of the step zero. A part that too few runs have
        measured uses the factor of the step.
        """
        if self.step is None or not self.step.is_known:
            return dict.fromkeys(PARTS, 1.0)
        factors = {name: self.parts[name].factor if name in self.parts else self.step.factor for name in PARTS}
        rest = Deviation.of([true.step_s / _scaled(said, factors, self.step.factor) for said, true in self.pairs])
        return {name: factor * rest.factor for name, factor in factors.items()}

    def corrected(self, prediction: Prediction) -> Prediction:
        """Returns ``prediction`` with its times and its memory multiplied by the factors."""
        by = self.factors
        busy = prediction.compute_s * by["compute_s"]
        update = prediction.optimizer_s * by["compute_s"]
        communication = prediction.communication_s * by["communication_s"]
        bubble = prediction.bubble_s * by["bubble_s"]
        faster = prediction.step_s / (busy + update + communication + bubble)
        by_memory = 1.0
        if self.memory is not None and self.memory.is_known:
            by_memory = self.memory.factor
        return replace(
            prediction,
            compute_s=busy,
            optimizer_s=update,
            communication_s=communication,
            bubble_s=bubble,
            memory_factor=by_memory,
            samples_per_s=prediction.samples_per_s * faster,
            tokens_per_s=prediction.tokens_per_s * faster,
            mfu=prediction.mfu * faster,
        )

    def as_json(self) -> dict[str, Any]:
        of_parts = {"step": self.step, **self.parts, "memory": self.memory}
        named = {name.removesuffix("_s"): each for name, each in of_parts.items() if each is not None}
        return {
            "runs": len(self.pairs),
            "corrected": self.step is not None and self.step.is_known,
            **{
                name: {"factor": deviation.factor, "spread": deviation.spread, "runs": deviation.runs}
                for name, deviation in named.items()
            },
        }

    def __str__(self) -> str:
        if self.step is None:
            return ""
        runs = "the last run" if self.step.runs == 1 else f"the last {self.step.runs} runs"
        text = f"{runs} on {self.machine} ({self.family}, {self.precision}): measured step time against predicted "
        text += str(self.step)
        if self.memory is not None:
            text += f", memory {self.memory}"
        if self.step.is_known:
            return f"{text}; corrected"
        return f"{text}; not corrected before {counted(FEWEST, 'run', 'runs')}"


def _deviation(pairs: Iterable[tuple[Values, Values]], name: str) -> Deviation | None:
    ratios = [
        measured / predicted
        for said, true in pairs
        if (predicted := getattr(said, name)) and (measured := getattr(true, name))
        if name == "memory_bytes" or predicted >= LEAST_SHARE * said.step_s
    ]
    if not ratios:
        return None
    return Deviation.of(ratios)


def _scaled(said: Values, by: Mapping[str, float], of_step: float) -> float:
    """Returns the step with its parts scaled, or, if its parts are unknown, with its total scaled."""
    parts = {name: getattr(said, name) for name in PARTS}
    if None in parts.values():
        return said.step_s * of_step
    return math.fsum(value * by[name] for name, value in parts.items())


def read_calibration(root: Path, config: Config, machine: Machine) -> Calibration:
    """Returns the measurements of the newest runs below ``root`` that are comparable with the run of ``config`` on
    ``machine``.

    Lines that cannot be read are skipped, and a file that cannot be read counts as empty.
    """
    key = key_of(config, machine)
    pairs: dict[str, tuple[Values, Values]] = {}
    for line in _lines(root / FILE):
        if all(line.get(name) == value for name, value in key.items()):
            with suppress(KeyError, TypeError, ValueError):
                pair = (_values(line["predicted"]), _values(line["measured"]))
                pairs.pop(str(line["run"]), None)
                pairs[str(line["run"])] = pair
    return Calibration(machine.name, key["family"], key["precision"], [*pairs.values()][-NEWEST:])


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yields the objects in the last ``TAIL_BYTES`` of a file."""
    try:
        content = read_tail(path, path.parent, TAIL_BYTES)
    except (OSError, DamagedFile):
        return
    for text in content.splitlines():
        with suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict):
                yield line


def _values(content: Mapping[str, Any]) -> Values:
    """Returns the values of a line; raises TypeError or ValueError if they are not the values of a run."""
    values = Values(**content)
    numbers = [value for value in vars(values).values() if value is not None]
    if not all(map(_number, numbers)) or values.step_s <= 0 or min(numbers) < 0:
        raise ValueError(f"{content} are not values of a run")
    return values
