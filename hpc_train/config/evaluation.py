"""Reads evaluations from a config: their data sets, the names of their metrics, and which value is the best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpc_train.config.extensions import load_source
from hpc_train.config.import_path import find_definition
from hpc_train.config.schema import Config, CustomModelConfig, DataConfig
from hpc_train.config.schema.key import check_keys
from hpc_train.errors import UserError, nearest

MAIN = ""  # the name of the validation split of ``data`` among the evaluation sets
LOWEST = ("loss", "perplexity")  # metrics whose lowest value is the best, by the end of their names
HIGHEST = ("accuracy", "top_k", "f1", "miou")


def metric_name(eval_set: str, metric: str) -> str:
    """Returns the key of a metric in a line of metrics: ``val_loss``, or ``val_code_loss`` of the set ``code``."""
    return f"val_{metric}" if eval_set == MAIN else f"val_{eval_set}_{metric}"


def eval_set_configs(data: DataConfig, eval_sets: Mapping[str, Any]) -> dict[str, DataConfig]:
    """Returns the data config of each of ``eval_sets``, which are ``data`` with other values. Raises UserError if a key
    does not exist or has a wrong type.
    """
    return {name: _eval_set(data, name, values) for name, values in eval_sets.items()}


def sequence_lengths(config: Config) -> dict[str, int]:
    """Returns the keys, with their values, that determine the tokens of a sample in ``data`` and the evaluation sets.
    Raises UserError if a key of an evaluation set does not exist or has a wrong type.
    """
    sets = {"data": config.data}
    sets |= {f"eval_sets.{name}": data for name, data in eval_set_configs(config.data, config.eval_sets).items()}
    lengths = {f"{name}.sequence_length": getattr(data, "sequence_length", None) for name, data in sets.items()}
    return {key: length for key, length in lengths.items() if length is not None}


def _eval_set(data: DataConfig, name: str, values: Any) -> DataConfig:
    where = f"eval_sets.{name}"
    if not isinstance(values, dict) or not values or not str(name).isidentifier():
        raise UserError(f"{where} is {values!r}", where=where, fix=f"+{where}.KEY=VALUE with a key of data")
    from omegaconf import OmegaConf  # workers without further evaluation sets do not need it
    from omegaconf.errors import OmegaConfBaseException

    from hpc_train.config.translate import translate

    kind = values.get("kind", data.kind)
    base = asdict(data) if kind == data.kind else {}
    schema = OmegaConf.create({"eval_sets": {name: OmegaConf.structured(load_source(kind).schema)}})
    try:
        merged = OmegaConf.merge(schema, {"eval_sets": {name: base}}, {"eval_sets": {name: values}})
        typed: Any = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise translate(error) or error from error
    built: DataConfig = typed["eval_sets"][name]
    path = getattr(built, "path", None)
    if path is None:
        return built
    return replace(built, path=str(Path(path).expanduser().absolute()))  # type: ignore[call-arg]


def metric_names(config: Config) -> list[str]:
    """Returns the keys that evaluations add to the metrics; a custom metric may add ``_KEY`` to its name."""
    metrics = ["loss", "accuracy", *config.metrics]
    if _lacks_accuracy(config):
        metrics.remove("accuracy")
    sets = (MAIN, *config.eval_sets)
    return list(dict.fromkeys(metric_name(eval_set, metric) for eval_set in sets for metric in metrics))


def _lacks_accuracy(config: Config) -> bool:
    """Returns whether the source of a user's module shows that evaluations compute no accuracy for it."""
    model = config.model
    if not isinstance(model, CustomModelConfig) or config.cluster.container.image is not None:
        return False
    try:
        definition = find_definition(model._target_, "model._target_")
    except UserError:  # which the check of the model reports
        return False
    bases = definition.bases
    if not bases or not all(base.startswith("torch.nn.") for base in bases):
        return False
    return model.loss == "mse" or "loss" in definition.names


def check_metric_name(name: str, config: Config, where: str) -> None:
    """Raises UserError if no evaluation has the metric ``name``."""
    names = metric_names(config)
    sets = (MAIN, *config.eval_sets)
    heads = tuple(f"{metric_name(eval_set, metric)}_" for eval_set in sets for metric in config.metrics)
    if name not in names and not name.startswith(heads):
        raise UserError(f"{where} is {name}, which no evaluation computes", where=where, fix=nearest(name, names))


def highest_is_best(name: str, mode: str, where: str) -> bool:
    """Returns whether the highest value of the metric ``name`` is the best. ``mode`` is min, max, or auto, which knows
    the built-in metrics. Raises UserError if ``mode`` is unknown, or auto for a metric that is not built in."""
    if mode in ("min", "max"):
        return mode == "max"
    if mode != "auto":
        raise UserError(f"{where} is {mode!r}", where=where, fix=nearest(mode, ("auto", "min", "max")))
    if name.endswith(LOWEST):
        return False
    if name.endswith(HIGHEST):
        return True
    what = f"{where}=auto does not know whether the lowest or the highest {name} is the best"
    raise UserError(what, where=where, fix=f"{where}=min or {where}=max")


@dataclass(frozen=True)
class BestMetric:
    """Names the metric of the best checkpoint, and whether its highest value is the best."""

    name: str
    highest: bool

    def is_better(self, value: float, than: float | None) -> bool:
        """Returns whether ``value`` is finite and better than ``than``; None is worse than any value."""
        if not math.isfinite(value):
            return False
        if than is None:
            return True
        return value > than if self.highest else value < than


LOWEST_LOSS = BestMetric("val_loss", highest=False)  # ranks checkpoints without ``checkpoint.keep_best``


def best_metric(name: str | None, mode: str) -> BestMetric | None:
    """Returns the metric ``name`` of ``checkpoint.keep_best``, or None; ``mode`` is ``checkpoint.best_mode``."""
    return None if name is None else BestMetric(name, highest_is_best(name, mode, "checkpoint.best_mode"))


def check_evaluation(config: Config) -> None:
    """Raises UserError for the first mistake in the evaluation sets, the names of their metrics, and the metric of the
    best checkpoint. Imports no torch.
    """
    sets = (MAIN, *config.eval_sets)
    keys = [metric_name(eval_set, metric) for eval_set in sets for metric in ("loss", *config.metrics)]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        fix = "rename the metric or the evaluation set; loss is the name of the loss"
        raise UserError(f"two metrics have the name {twice}", where="metrics, eval_sets", fix=fix)
    for name, data in eval_set_configs(config.data, config.eval_sets).items():
        check_keys(data, f"eval_sets.{name}")
        source = load_source(data.kind)
        gives = source.sample_kind(data)
        trained = load_source(config.data.kind).sample_kind(config.data)
        if gives != trained:
            what = f"eval_sets.{name} gives {gives} as samples, but data gives {trained}"
            raise UserError(what, where=f"eval_sets.{name}", fix="use data of the same kind")
        if source.check_inputs is not None:
            source.check_inputs(data)
    if config.checkpoint.keep_best is not None:
        check_metric_name(config.checkpoint.keep_best, config, "checkpoint.keep_best")
        best_metric(config.checkpoint.keep_best, config.checkpoint.best_mode)
