"""Compares the runs of a sweep: the overrides that differ, the metric, and the best run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from hpc_train.config.evaluation import BestMetric, best_metric
from hpc_train.config.schema import Config
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.runs.job_status import View

Settings = dict[str, str]  # override key -> value, as on the command line
UNCOMPARED = ("run.name", "run.root", "run.fork", "launch.")  # keys that do not affect training
DEFAULT = "default"  # the value in a table of a key that another run overrides


def metric_of(config: Config) -> BestMetric | None:
    """Returns the metric by which the runs of ``config`` keep their best checkpoints; None without one."""
    return best_metric(config.checkpoint.keep_best, config.checkpoint.best_mode)


def best_metric_of(config: Mapping[str, Any]) -> BestMetric | None:
    """Returns the same as ``metric_of`` for a config of plain values."""
    settings = config.get("checkpoint") or {}
    return best_metric(settings.get("keep_best"), settings.get("best_mode", "auto"))


def _normalized(value: str) -> str:
    """Returns a float in one spelling, as one command line may have 3e-2 and another 0.03."""
    try:
        return value if value.lstrip("+-").isdigit() else str(float(value))
    except ValueError:
        return value


def _value_in(config: dict[str, Any], key: str) -> Any:
    """Returns the value of a dotted key; for a config group such as ``optim``, its file; None if it has none."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if isinstance(value, dict):
        return value.get("name", value.get("kind"))
    return value


def varied(settings: Sequence[Settings]) -> list[str]:
    """Returns the keys whose values differ between the runs, in the order of the command line."""
    keys = dict.fromkeys(key for overrides in settings for key in overrides)
    return [key for key in keys if len({overrides.get(key) for overrides in settings}) > 1]


@dataclass(frozen=True)
class Comparison:
    """Holds what distinguishes the runs of a sweep, and the metric that ranks them.

    Attributes:
        keys: the overrides that differ between the runs.
        settings: their values by run directory; a run without such an override has the default.
        metric: None takes ``val_loss`` if a run has it, else ``loss``.
    """

    keys: tuple[str, ...] = ()
    settings: Mapping[Path, Settings] = field(default_factory=dict)
    metric: BestMetric | None = None

    @classmethod
    def of(cls, runs: Iterable[RunDirectory], metric: BestMetric | None = None) -> Comparison:
        """Reads the overrides from the records of ``runs``, and keys that only some runs override from their configs.

        A run that was continued with other overrides than the rest of its sweep lacks some of theirs.
        """
        settings: dict[Path, Settings] = {}
        for run in runs:
            parts = [override.lstrip("+~").partition("=") for override in run.record().get("overrides", [])]
            settings[run.path] = {key: _normalized(value) for key, _, value in parts if not key.startswith(UNCOMPARED)}
        keys = dict.fromkeys(key for overrides in settings.values() for key in overrides)
        for path, overrides in settings.items():
            missing = [key for key in keys if key not in overrides]
            if missing:
                config = RunDirectory(path).plain_config(*{key.partition(".")[0] for key in missing})
                values = {key: _value_in(config, key) for key in missing}
                overrides |= {key: _normalized(str(value)) for key, value in values.items() if value is not None}
        return cls(tuple(varied([*settings.values()])), settings, metric)

    @property
    def columns(self) -> tuple[str, ...]:
        """Returns the keys that have a separate column; tables always show the strategy."""
        return tuple(key for key in self.keys if key != "strategy")

    def row(self, run: RunDirectory) -> list[str]:
        values = self.of_run(run)
        return [values[key] for key in self.columns]

    def of_run(self, run: RunDirectory) -> Settings:
        overrides = self.settings.get(run.path, {})
        return {key: overrides.get(key, DEFAULT) for key in self.keys}

    def words(self, run: RunDirectory) -> str:
        """Returns ``optim.lr=1e-3 model.dim=64``."""
        return " ".join(f"{key}={value}" for key, value in self.of_run(run).items())

    def ranked_by(self, views: Sequence[View]) -> BestMetric:
        if self.metric is not None:
            return self.metric
        evaluated = any(is_number(view.metrics.get("val_loss")) for view in views)
        return BestMetric("val_loss" if evaluated else "loss", highest=False)

    def values(self, views: Sequence[View]) -> list[float | None]:
        """Returns the metric of each run that has ended; None if it is unknown or not finite."""
        name = self.ranked_by(views).name
        values = (view.metrics.get(name) for view in views)
        return [
            value if view.exit is not None and is_number(value) else None
            for view, value in zip(views, values, strict=True)
        ]

    def best(self, views: Sequence[View]) -> int | None:
        """Returns the index of the best of the runs that are done.

        None if fewer than two of them have a value, or if ``views`` cover only a part of the sweep.
        """
        if len(views) < len(self.settings):
            return None
        values = {
            index: value
            for index, (view, value) in enumerate(zip(views, self.values(views), strict=True))
            if view.exit == Exit.DONE and value is not None
        }
        if len(values) < 2:
            return None
        extreme = max if self.ranked_by(views).highest else min
        return extreme(values, key=values.__getitem__)


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def evaluated_parts(runs: Iterable[RunDirectory]) -> list[str]:
    """Returns one line, ``evaluated 320 of 1,248 samples``, if runs evaluated only a part of their validation set."""
    results = (run.record().get("result") or {} for run in runs)
    parts = dict.fromkeys(str(result["evaluated"]) for result in results if result.get("evaluated"))
    if not parts:
        return []
    return [f"evaluated {'; or '.join(parts)}"]
