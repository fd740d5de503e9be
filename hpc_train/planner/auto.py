"""Chooses the layout of ``strategy=auto``, and the layouts for the numbers of nodes with which an elastic run may
continue.

The choice is the best row of the planner, or the simplest of the rows that differ by less than the planner's error. It
depends only on the config, the numbers of nodes and workers, and the machine file. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from heapq import nsmallest
from itertools import chain, islice
from pathlib import Path
from typing import Any

from hpc_train.config.schema import Config
from hpc_train.config.schema.key import keys
from hpc_train.errors import UserError
from hpc_train.layout.layout import JobShape
from hpc_train.layout.resolve import SIMPLEST, open_keys
from hpc_train.layout.techniques import compiler_mode
from hpc_train.layout.validate import check_values
from hpc_train.planner.calibration import Calibration, read_calibration
from hpc_train.planner.candidates import Candidate, candidates, close_and_others, distinct, nested, refusal, with_values
from hpc_train.planner.machine import Machine, machine_of_job
from hpc_train.planner.work import count_work
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import is_present
from hpc_train.units import counted, format_bytes

# Somewhat below the mean absolute error of most sources in docs/measurements/plan.md (4 to 22 %), because two layouts
# of one model on one machine share part of their errors.
ERROR = 0.08
ROWS = 10  # of the table
MOST_COUNTS = 32  # numbers of nodes for which a layout is chosen; each may take a second
_OPTIMIZER = ("name", "_target_", "args", "moments", "elementwise", "state_per_parameter", "groups", "in_backward")
_TRAINING = (
    "activation_checkpointing",
    "activation_offload",
    "compile",
    "loss_chunks",
    "z_loss",
    "debug",
    "reproducible",
)


@dataclass(frozen=True)
class Choice:
    """Holds the values that the planner has chosen for the open keys of a config, and the table of layouts that they
    come from.

    Attributes:
        content: the content of the file ``plan.json`` in the run directory.
    """

    content: Mapping[str, Any]

    @property
    def text(self) -> str:
        return json.dumps(self.content, indent=1) + "\n"

    @property
    def lines(self) -> list[str]:
        """Returns the choice in one line, and one line for each other number of nodes."""
        content = self.content
        others = [
            f"on {counted(int(count), 'node', 'nodes')}: {other['chosen']}"
            for count, other in content["other_nodes"].items()
        ]
        return [f"strategy=auto: {content['chosen']}", *others]

    def apply(self, config: Config) -> Config:
        """Returns ``config`` without open keys, with the layouts for other numbers of nodes."""
        content = self.content
        main = content["settings"]
        others: dict[str, Any] = dict.fromkeys(map(str, range(content["fewest_nodes"], content["nodes"])))
        for count, other in content["other_nodes"].items():
            settings = other["settings"]
            if settings is not None:
                settings = nested({name: value for name, value in settings.items() if main[name] != value})
            others[count] = settings
        chosen = with_values(config, main)
        return replace(chosen, strategy=replace(chosen.strategy, for_nodes=others))


def question(config: Config, shape: JobShape, machine: str) -> str:
    """Returns a hash of what a choice depends on.

    It leaves out the numbers of the machine file, so that a resumed run keeps its layout after a new calibration.
    """
    groups = {name: asdict(getattr(config, name)) for name in ("model", "data", "batch", "strategy", "precision")}
    facts = {
        **groups,
        "optim": {name: getattr(config.optim, name) for name in _OPTIMIZER},
        "train": {name: getattr(config.train, name) for name in _TRAINING},
        "compiler": compiler_mode(config),
        "hooks": {name: asdict(hook) for name, hook in config.hooks.items()},
        "devices": {"nodes": shape.nodes, "fewest": shape.fewest_nodes, "per_node": shape.workers},
        "machine": machine,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def choice_of_job(config: Config, run: RunDirectory, shape: JobShape) -> Choice:
    """Returns the choice for a job. If an earlier submission of ``run`` asked the same question, its choice is reused.
    Raises UserError if the machine or the size of the model is unknown, or if no layout is possible or fits."""
    machine = machine_of_job(config.cluster.machine, shape.gpus, shape.gpu_types)
    if is_present(run.plan):
        with suppress(ValueError):
            content = json.loads(run.read(run.plan))
            if isinstance(content, dict) and content.get("asked") == question(config, shape, machine.name):
                return Choice(content)
    return choose(config, shape, machine)


def choose(config: Config, shape: JobShape, machine: Machine) -> Choice:
    """Returns the choice for the open keys of ``config``. Jobs of a sweep with the same question share the choice.
    Raises UserError if the config is wrong, the size of the model is unknown, or no layout is possible or fits."""
    simplest = with_values(config, {name: value for name, value in SIMPLEST.items() if name in open_keys(config)})
    check_values(simplest)
    try:
        count_work(config)
    except UserError as error:
        what = f"strategy=auto cannot choose a layout: {error.what}"
        fix = f"{error.fix}; or +strategy=dp"
        raise UserError(what, where=error.where, fix=fix) from error
    learned = read_calibration(Path(config.run.root), config, machine)
    return _shared(_Question(question(config, shape, machine.name), config, shape, machine, learned))


@dataclass(frozen=True)
class _Question:
    """Describes a question to the planner. Two questions are equal if their hashes, machine numbers and calibrations
    are equal."""

    asked: str
    config: Config = field(compare=False)
    shape: JobShape = field(compare=False)
    machine: Machine = field(hash=False)
    learned: Calibration = field(hash=False)


@lru_cache(maxsize=64)
def _shared(which: _Question) -> Choice:
    shape = which.shape
    machine = which.machine
    names = open_keys(which.config)
    main = _chosen(which, shape.nodes)
    others: dict[str, Any] = {}
    counts = range(shape.fewest_nodes, shape.nodes)
    for count in counts[:: max(1, -(-len(counts) // MOST_COUNTS))]:  # all, or a selection that includes the smallest
        try:
            others[str(count)] = _chosen(which, count)
        except UserError as error:  # no layout is possible
            others[str(count)] = {"chosen": error.what, "settings": None, "rows": []}
    fixed = {name: value for name, value, _ in keys(which.config) if name in (*SIMPLEST, "batch.micro_size")}
    content = {
        **main,
        "asked": which.asked,
        "nodes": shape.nodes,
        "fewest_nodes": shape.fewest_nodes,
        "workers_per_node": shape.workers,
        "error": ERROR,
        "kept": {name: value for name, value in fixed.items() if name not in names},
        "other_nodes": others,
        "machine": asdict(machine),
        "calibration": which.learned.as_json(),
    }
    return Choice(content)


def _chosen(which: _Question, nodes: int) -> dict[str, Any]:
    """Returns the choice for ``nodes`` nodes and the table of the best layouts; raises UserError if no layout is
    possible or fits."""
    config = which.config
    names = open_keys(which.config)
    machine = which.machine.with_devices(which.shape.workers)
    fixed = {name for name, _, _ in keys(config)} - {*names}
    predicted = [
        replace(candidate, prediction=which.learned.corrected(candidate.prediction))
        for candidate in candidates(config, machine, nodes * which.shape.workers, fixed)
    ]
    close, others = close_and_others(predicted, ERROR)
    if not close:
        raise _no_layout(config, nodes, which.shape.workers, predicted, machine)
    best = close[0]
    settings = {name: best.values[name] for name in names}
    if "strategy.schedule" in names:
        settings["strategy.schedule"] = best.layout.schedule
    count = max(ROWS, len([*distinct(close)]))
    compared = [*islice(distinct(chain(close, others)), count)][1:]
    shown = (best, *nsmallest(ROWS - 1, compared, key=_seconds))
    recomputed = str(settings.get(_RECOMPUTED) or config.train.activation_checkpointing)
    chosen = str(best.layout)
    if recomputed != "none":
        chosen += f", activation checkpointing {recomputed}"
    return {
        "chosen": f"{chosen}; predicted {best.prediction.step_s:.3g} s per step on {machine.name}",
        "settings": settings,
        "rows": [candidate.to_json() | {"why": _why(candidate, best)} for candidate in shown],
    }


_RECOMPUTED = "train.activation_checkpointing"


def _seconds(candidate: Candidate) -> float:
    return candidate.prediction.step_s


def _no_layout(config: Config, nodes: int, per_node: int, predicted: list[Candidate], machine: Machine) -> UserError:
    if predicted:
        nearest = min(predicted, key=lambda candidate: candidate.prediction.needed_bytes)
        return UserError(
            f"strategy=auto found no layout that fits on {nodes} x {per_node} devices: {nearest.layout} needs the "
            f"least memory, {format_bytes(nearest.prediction.needed_bytes)} of the "
            f"{format_bytes(nearest.prediction.device_bytes)} of a device ({machine.device})",
            where="strategy, cluster.nodes",
            fix="more nodes, a shorter data.sequence_length, strategy.cp=2, strategy.offload=optimizer, or fewer keys "
            "of strategy, batch and train that are set",
        )
    refused = refusal(config, nodes, per_node, {name for name, _, _ in keys(config)} - {*open_keys(config)})
    if refused is not None:
        return refused
    return UserError(
        f"strategy=auto found no layout for {nodes} x {per_node} devices with the keys that are set",
        where="strategy",
        fix="set fewer keys of strategy, batch and train",
    )


def _why(candidate: Candidate, best: Candidate) -> str:
    """Returns why ``best`` is preferred to ``candidate``."""
    if candidate is best:
        return "chosen"
    slower = candidate.prediction.step_s / best.prediction.step_s - 1
    if abs(slower) <= ERROR and candidate.complexity > best.complexity:
        return f"{abs(slower):.0%} {'slower' if slower >= 0 else 'faster'}, within the error, and more techniques"
    part, longer = candidate.prediction.longest_beside(best.prediction)
    return f"{slower:.0%} slower: {part} +{longer:.2g} s"
