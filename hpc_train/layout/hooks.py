"""Checks the metrics and hooks of a config before anything is submitted, without importing them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpc_train.config.evaluation import check_metric_name, highest_is_best
from hpc_train.config.import_path import check_call, find_definition
from hpc_train.config.schema import Config, TargetConfig
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout

EARLY_STOPPING = "hpc_train.train.hooks.early_stopping.EarlyStopping"
SAMPLES = "hpc_train.train.hooks.samples.Samples"
EMA = "hpc_train.train.hooks.ema.EMA"


def check_targets(config: Config, layout: Layout) -> None:
    """Checks the import paths and the arguments of all metrics and hooks.

    Raises:
        UserError: a metric or hook cannot be found or does not take its arguments, or a built-in hook cannot use them.
    """
    for name, metric in config.metrics.items():
        _check_target(metric, f"metrics.{name}", batch=2)
    for name, hook in config.hooks.items():
        _check_target(hook, f"hooks.{name}", batch=0)
    for name, hook in config.hooks.items():
        check = _CHECKS.get(hook._target_)
        if check is not None:
            check(hook.args, f"hooks.{name}.args", config, layout)


def averages_of_weights(config: Config) -> int:
    """Returns how many values the built-in hooks keep for each trained parameter; hooks of the user's are unknown."""
    return sum(hook._target_ == EMA for hook in config.hooks.values())


def _check_target(target: TargetConfig, where: str, batch: int) -> None:
    """Checks a class, which is built from ``args``, or a function, which also gets ``batch`` arguments by position."""
    function = find_definition(target._target_, f"{where}._target_").is_function
    positional = batch if function else 0
    args, key = target.args, f"{where}.args"
    check_call(target._target_, f"{where}._target_", positional=positional, arguments=args, arguments_key=key)


def _check_ema(args: Mapping[str, Any], where: str, config: Config, layout: Layout) -> None:
    decay = args.get("decay", 0.0)
    if not _is_number(decay) or not 0 <= decay < 1:
        what = f"{where}.decay is {decay!r}, but must be at least 0 and below 1"
        raise UserError(what, where=f"{where}.decay", fix=f"{where}.decay=0.999")


def _check_early_stopping(args: Mapping[str, Any], where: str, config: Config, layout: Layout) -> None:
    monitor = args.get("monitor", "val_loss")
    if monitor != "loss":  # the training loss, which is known at evaluations as well
        check_metric_name(monitor, config, f"{where}.monitor")
    highest_is_best(monitor, args.get("mode", "auto"), f"{where}.mode")
    patience = args.get("patience", 1)
    if not isinstance(patience, int) or isinstance(patience, bool) or patience < 1:
        what = f"{where}.patience is {patience!r}, but must be a number of evaluations, at least 1"
        raise UserError(what, where=f"{where}.patience", fix=f"{where}.patience=3")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_CHECKS = {
    EMA: _check_ema,
    EARLY_STOPPING: _check_early_stopping,
}
