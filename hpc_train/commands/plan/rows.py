"""Finds the rows of a plan: the best layouts for a training run, with the time and cost of the whole run.

It also writes the commands that train with them, and queries Slurm for the start of their jobs.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra

from hpc_train.config.arguments import STRATEGY, with_right_plus
from hpc_train.config.command_line import CommandLine, JobComposer
from hpc_train.config.compose import typed
from hpc_train.config.conf_files import packaged
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.layout.layout import JobShape
from hpc_train.layout.resolve import SIMPLEST
from hpc_train.layout.sizes import active_count, parameter_count
from hpc_train.layout.techniques import AUTO
from hpc_train.layout.validate import checked_layout
from hpc_train.planner.calibration import Calibration, read_calibration
from hpc_train.planner.candidates import COMPILE, Candidate, candidates, distinct, fastest, refusal, with_values
from hpc_train.planner.machine import Machine
from hpc_train.planner.prediction import Prediction
from hpc_train.run.directory import RunDirectory
from hpc_train.run.streams import unescaped
from hpc_train.runs.cost import Prices
from hpc_train.schedulers.slurm.client import SlurmError
from hpc_train.schedulers.slurm.queue_estimate import Start, describe_accuracy, read_estimates, starts_of
from hpc_train.schedulers.slurm.site import read_site
from hpc_train.units import format_bytes, format_duration

STRATEGIES = ("dp", "zero1", "zero2", "zero3", "hsdp", "tp", "hybrid", "hybrid3d")  # the simplest first
_SCHEMA = "/schema/model/"
_RECOMPUTED = "train.activation_checkpointing"
_OF_LAYOUT = ("strategy.", "batch.")  # groups whose keys make up the layout, except for the keys below
_NOT_OF_LAYOUT = ("strategy.offload", "strategy.compression")
_SPLIT = {"strategy.dp", *(name for name in SIMPLEST if name.startswith("strategy."))}  # the keys that a strategy sets
ROWS = 10
NOISE = 0.02  # layouts closer than this are equally fast; the simplest of them is first
ORDERS = ("time", "gpus", "gpu-hours", "cost")
_OFFLOAD = "strategy.offload"
_IF_NOTHING_FITS = (_OFFLOAD, "strategy.cp")


class PlannedTraining:
    """Describes one training run of a plan. Its composer must be open during the search for a command.

    Attributes:
        fixed: the config keys that the command sets, including the keys of a strategy that it names.

    Args:
        strategy: the key that chooses a strategy: ``+strategy`` or ``strategy``.
        model: its name in a plan that compares models, otherwise empty.
    """

    def __init__(self, line: CommandLine, compose: JobComposer, strategy: str = "+strategy", model: str = "") -> None:
        self.line = line
        self.model = model
        self.config: Config = typed(compose(list(line.overrides)))
        self.fixed = {_key(override) for override in line.overrides}
        if "strategy" in self.fixed:
            self.fixed |= _SPLIT
        self._compose = compose
        self._strategy = strategy

    @property
    def parameters(self) -> int | None:
        return parameter_count(self.config.model)

    @property
    def active_parameters(self) -> int | None:
        """Returns the number of parameters that compute a token."""
        return active_count(self.config.model)

    def with_models(self) -> Iterator[PlannedTraining]:
        """Yields this training with each model of ``conf/model`` that is of the same kind."""
        others = [override for override in self.line.overrides if not override.lstrip("+").startswith("model=")]
        loader = GlobalHydra.instance().config_loader()
        for name in loader.get_group_options("model"):
            if not self.line.directories:  # the packaged file of a model names the schema of its kind
                defaults = map(str, packaged(f"model/{name}").get("defaults", []))
                schemas = [entry for entry in defaults if entry.startswith(_SCHEMA)]
                if schemas and f"{_SCHEMA}{self.config.model.kind}@_here_" not in schemas:
                    continue
            line = replace(self.line, overrides=(f"model={name}", *others))
            try:
                training = PlannedTraining(line, self._compose, self._strategy, name)
            except UserError:  # a model that requires more keys, or lacks a key that is set
                continue
            if training.config.model.kind == self.config.model.kind and training.parameters is not None:
                yield training

    def command(self, candidate: Candidate, machine: Machine) -> list[str]:
        """Returns the shortest list of words that, added to the user's overrides, trains with ``candidate``."""
        workers = candidate.devices // candidate.nodes
        values = {**candidate.values, "cluster.nodes": candidate.nodes}
        if not machine.rates.cores and workers < machine.devices_per_node:
            values["cluster.gpus_per_node"] = workers
        chosen = _without(values, self.fixed)
        different = {name: _different(chosen, base) for name, base in self.with_strategies.items()}
        strategy = min(different, key=lambda name: len(different[name]))
        needed = different[strategy]
        for name in [*needed]:
            if not name.startswith(_OF_LAYOUT) or name in _NOT_OF_LAYOUT:
                continue
            fewer = _without(needed, {name})
            base = with_values(self.with_strategies[strategy], fewer)
            try:
                layout = checked_layout(base, candidate.nodes, workers)
            except UserError:
                continue
            if replace(layout, notes=candidate.layout.notes) == candidate.layout:
                needed = fewer  # the key does not change the layout
        words = [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in needed.items()]
        if strategy:
            words.insert(0, f"{self._strategy}={strategy}")
        return words

    @cached_property
    def with_strategies(self) -> Mapping[str, Config]:
        """Returns strategy name -> config with that strategy; only the unchanged config if the user has named one.

        The strategy files of the package set only keys of ``strategy``, so their values replace those of a config that
        is composed once. Each strategy is composed if an interpolation of the user may refer to these keys, or a
        directory of the user may hide the files.
        """
        if "strategy" in self.fixed:
            return {"": self.config}
        simple = self._strategy == "+strategy" and not self.line.directories
        if not simple or any("${" in override for override in self.line.overrides):
            words = self.line.overrides
            return {name: typed(self._compose([*words, f"{self._strategy}={name}"])) for name in STRATEGIES}
        files = {name: packaged(f"strategy/{name}").items() for name in STRATEGIES}
        values = {name: {f"strategy.{key}": value for key, value in file} for name, file in files.items()}
        return {name: with_values(self.config, _without(values[name], self.fixed)) for name in STRATEGIES}


def without_auto(line: CommandLine) -> CommandLine:
    """Returns ``line`` without ``strategy=auto``, since a plan compares all strategies unless one is named."""
    rest = (text for text in line.overrides if _key(text) != "strategy" or text.partition("=")[2] != AUTO)
    return replace(line, overrides=tuple(rest))


def strategy_key(line: CommandLine) -> str:
    """Returns ``+strategy``, or ``strategy`` if the config of an experiment or the user already chooses one."""
    if any(STRATEGY.match(override) for override in line.overrides):
        return "strategy"
    words = with_right_plus([*line.overrides, f"+strategy={STRATEGIES[0]}", *_directory(line)])
    return next(word.partition("=")[0] for word in words if STRATEGY.match(word))


def full_command(line: CommandLine, words: Collection[str]) -> str:
    return shlex.join(["python", "-m", "hpc_train", *_directory(line), *line.overrides, *words, "-m"])


def _directory(line: CommandLine) -> list[str]:
    if line.config_directory is None:
        return []
    return ["-cd", str(line.config_directory)]


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+")


def _without(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _different(values: Mapping[str, Any], base: Config) -> dict[str, Any]:
    """Returns the entries of ``values`` that differ from ``base``."""
    different = {}
    for name, value in values.items():
        group, _, key = name.partition(".")
        present = getattr(getattr(base, group), key)
        if name == _RECOMPUTED and present == "auto":
            present = "none"  # a fixed strategy does not recompute
        if present != value:
            different[name] = value
    return different


@dataclass(frozen=True)
class Row:
    """Describes a layout and the time and cost of the whole run; None where the number of steps is unknown.

    Attributes:
        start: the expected start in the queue; None for a config that does not submit to Slurm.
    """

    training: PlannedTraining
    candidate: Candidate
    prices: Prices
    start: Start | None = None

    @property
    def prediction(self) -> Prediction:
        return self.candidate.prediction

    @property
    def seconds(self) -> float | None:
        steps = total_steps(self.training.config)
        if steps is None:
            return None
        return steps * self.prediction.step_s

    @property
    def refused(self) -> bool:
        """Returns whether Slurm refuses the job."""
        return self.start is not None and bool(self.start.refusal)

    @property
    def done(self) -> float | None:
        """Returns when the run is done, in seconds since 1970, if a requeued job starts again at once."""
        if self.start is None or self.start.at is None or self.seconds is None:
            return None
        return self.start.at + self.seconds

    @property
    def gpu_hours(self) -> float | None:
        if self.seconds is None:
            return None
        return self.seconds * self.candidate.devices / 3600

    @property
    def cost(self) -> float | None:
        if self.gpu_hours is None or self.prices.gpu_hour is None:
            return None
        return self.gpu_hours * self.prices.gpu_hour


def total_steps(config: Config) -> int | None:
    """Returns the number of steps; None if it follows from the length of the data."""
    if config.train.epochs is not None:
        return None
    return config.train.steps


@dataclass(frozen=True)
class Search:
    """Finds the rows of a plan.

    Attributes:
        rows: the largest number of rows, unless there are more numbers of GPUs, each of which has a row.
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

    def find(self, training: PlannedTraining) -> tuple[list[Row], int]:
        """Returns the rows, the best first, equally many per number of GPUs, and how many layouts were compared.

        The optimizer state is offloaded only if nothing fits without it, and sequences are shared by ranks only if
        nothing fits even so, unless ``also`` or the user names the key. If compiled layers are compared with others,
        the others have a row too.

        Raises:
            UserError: no layout is possible, or none fits.
        """
        layouts = self._candidates(training, self.also)
        also = self.also
        for name in _IF_NOTHING_FITS:
            fits = any(layout.prediction.fits for layout in layouts)
            if not fits and name not in {*training.fixed, *also}:
                also |= {name}
                layouts = self._candidates(training, also)
        share = max(1, self.rows // len(self.gpus))
        rows = []
        for count in self.gpus:
            on_devices = [layout for layout in layouts if layout.devices == count]
            best = [*islice(distinct(fastest(on_devices, NOISE)), share)]
            if len(best) > 1 and all(layout.values.get(COMPILE) for layout in best):
                eager = [layout for layout in on_devices if not layout.values[COMPILE]]
                best[-1] = next(fastest(eager, NOISE), best[-1])
            rows += [Row(training, layout, self.prices) for layout in best]
        if rows:
            return self.ordered(rows), len(layouts)
        if layouts:
            raise self._too_large(layouts)
        raise self._impossible(training)

    def ordered(self, rows: Sequence[Row]) -> list[Row]:
        """Returns the rows in the order of ``sort``."""
        if self.sort == "gpus":
            return sorted(rows, key=lambda row: (row.candidate.devices, row.prediction.step_s))
        if self.sort in ("gpu-hours", "cost"):
            return sorted(rows, key=lambda row: row.prediction.step_s * row.candidate.devices)
        return sorted(rows, key=lambda row: (not row.prediction.has_room, row.prediction.step_s))

    def _candidates(self, training: PlannedTraining, also: frozenset[str]) -> list[Candidate]:
        learned = self.calibration(training.config)
        return [
            replace(candidate, prediction=learned.corrected(candidate.prediction))
            for count in with_progress(self.gpus)
            for candidate in candidates(training.config, self.machine, count, training.fixed, also)
        ]

    def _impossible(self, training: PlannedTraining) -> UserError:
        """Returns why the keys that are set permit no layout on any number of GPUs."""
        per_node = self.machine.devices_per_node
        places = [(max(1, count // per_node), min(count, per_node)) for count in self.gpus]
        refusals = [refusal(training.config, *place, training.fixed) for place in places]
        first = next((error for error in refusals if error is not None), None)
        if first is not None and {str(error) for error in refusals} == {str(first)}:
            return first  # another number of GPUs does not help
        why = "" if first is None else f": {first.what}"
        return UserError(
            f"no layout is possible with these settings{why}",
            where="the command line",
            fix="set fewer keys of strategy and batch, or give another number of --gpus",
        )

    def _too_large(self, layouts: Sequence[Candidate]) -> UserError:
        least = nearest(layouts)
        name = str(least.layout)
        if least.values.get(_OFFLOAD, "none") != "none":
            name += " with its optimizer state in host memory"
        memory = format_bytes(least.prediction.device_bytes)
        return UserError(
            f"no layout fits: {name} needs the least memory, {format_bytes(least.prediction.needed_bytes)} of the "
            f"{memory} of a GPU ({self.machine.device})",
            where="--gpus, --machine",
            fix="more GPUs, a machine with more memory, or a shorter data.sequence_length",
        )


def nearest(layouts: Sequence[Candidate]) -> Candidate:
    """Returns the first of the candidates that need the least memory."""
    least = layouts[0]
    for layout in layouts[1:]:
        if not layout.prediction.needs_more_than(least.prediction):
            least = min(least, layout, key=lambda candidate: candidate.prediction.needed_bytes)
    return least


def unknown_end() -> UserError:
    """Returns the error for a deadline that cannot be compared with the end of training."""
    return UserError(
        "the end of training cannot be predicted: the number of steps, or the start of the job, is unknown",
        where="train.epochs, --within",
        fix="train.steps=N instead of train.epochs, and a queue that responds",
    )


def in_time(rows: Sequence[Row], deadline: float) -> list[Row]:
    """Returns the rows that are done by ``deadline``, in seconds since 1970; without a queue they start now.

    Raises:
        UserError: none is done by then, or the number of steps is unknown.
    """
    ends: dict[int, float] = {}
    for number, row in enumerate(rows):
        end = row.done
        if row.start is None and row.seconds is not None:
            end = time.time() + row.seconds
        if end is not None:
            ends[number] = end
    if not ends:
        raise unknown_end()
    punctual = [rows[number] for number, end in ends.items() if end <= deadline]
    if punctual:
        return punctual
    first = min(ends, key=lambda number: ends[number])
    row = rows[first]
    late = format_duration(ends[first] - deadline)
    raise UserError(
        f"no layout is done in time: the fastest, {row.candidate.layout} on {row.candidate.devices} GPUs, takes "
        f"{format_duration(row.seconds or 0)} and is done {late} later",
        where="--within",
        fix="more --gpus, fewer train.steps, or a later time",
    )


def with_starts(rows: Sequence[Row], config: Config, sort: str) -> tuple[list[Row], list[str]]:
    """Returns the rows with their starts, and notes. If sorted by time, the row that is done first comes first.

    If Slurm does not respond, the rows are returned as they are, with one line that says so.
    """
    from hpc_train.launch.job import Job  # imports what submits jobs
    from hpc_train.launch.sbatch import shape_options

    site = read_site()
    if not site.partitions:
        return [*rows], ["the start in the queue is unknown: Slurm does not respond (scontrol show partition)"]
    run = RunDirectory(Path(config.run.root, "plan"))  # is not created
    shapes = []  # the options of sbatch that determine when the job of a row starts
    for row in rows:
        nodes = row.candidate.nodes
        workers = row.candidate.devices // nodes
        gpus = 0 if config.cluster.gpus_per_node == 0 else workers
        shape = JobShape.on_slurm(nodes, gpus, workers)
        chosen = with_values(config, {**row.candidate.values, "cluster.nodes": nodes})
        shapes.append(shape_options(Job(chosen, row.candidate.layout, shape, run), site))
    try:
        starts = starts_of(shapes)
    except SlurmError as error:
        return [*rows], [f"the start in the queue is unknown: {error.what}"]
    started = [replace(row, start=starts[shape]) for row, shape in zip(rows, shapes, strict=True)]
    if sort == "time" and all(row.done is not None or row.refused for row in started):
        started.sort(key=lambda row: row.done or float("inf"))
    refused = {row.candidate.devices: row.start.refusal for row in started if row.start and row.refused}
    notes = [f"Slurm refuses {devices} GPUs: {why.splitlines()[-1]}" for devices, why in refused.items()]
    accuracy = describe_accuracy(read_estimates(Path(config.run.root), site.name, config.cluster.partition))
    accuracy = accuracy or "the error of its estimates will be known after three jobs here have started"
    return started, [*notes, f"starts: as Slurm estimates at {time.strftime('%H:%M')}; {accuracy}"]


def with_progress(counts: Iterable[int]) -> Iterator[int]:
    """Yields numbers of GPUs; a terminal shows which one is compared, until the last."""
    if not sys.stderr.isatty():
        yield from counts
        return
    for count in counts:
        print(f"\rcomparing layouts on {count:,} GPUs ", end="", file=sys.stderr, flush=True)
        yield count
    print("\r\x1b[K", end="", file=unescaped(sys.stderr), flush=True)
