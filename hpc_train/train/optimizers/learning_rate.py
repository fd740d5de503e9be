"""Computes the learning rate of each step.

The learning rate is a pure function of the step, so there is no state to save or resume. A scheduler class of torch is
stepped from the start of the run to the requested step.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from hpc_train.config.import_path import locate, refuse_unknown
from hpc_train.config.schema import OptimConfig
from hpc_train.errors import UserError
from hpc_train.layout.optimizers import SCHEDULES, parse_schedule

_WHERE = "optim.schedule"


def learning_rates(config: OptimConfig, batch_size: int, total_steps: int) -> Callable[[int], float]:
    """Returns the function from a step in [0, ``total_steps``) to its learning rate.

    Args:
        batch_size: samples per step, for ``optim.lr_scaling``.

    Raises:
        UserError: a custom schedule cannot be imported or called.
    """
    schedule = parse_schedule(config.schedule)
    peak = peak_rate(config, batch_size)
    if not schedule.is_own:
        return lambda step: rate(config, peak, step, total_steps)

    name = schedule.name
    make = locate(name, _WHERE)
    parameters = inspect.signature(make).parameters
    first = next(iter(parameters), "step")
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        accepted = [parameter for parameter in parameters if parameter != first]
        refuse_unknown(name, [*schedule.args], accepted, f"{_WHERE}.args")
    arguments = dict(schedule.args)
    if "total_steps" in parameters:
        arguments.setdefault("total_steps", total_steps)
    if isinstance(make, type) or first == "optimizer":
        return _Scheduler(name, make, peak, arguments)
    return lambda step: peak * _checked_factor(name, make, step, arguments)


def describe_rates(config: OptimConfig, size: int) -> str:
    """Returns the highest learning rate and the schedule as text, for ``size`` samples per step."""
    schedule = parse_schedule(config.schedule)
    text = f"{peak_rate(config, size):g}"
    if config.lr_scaling != "none":
        text += f" ({config.lr:g} x {config.lr_scaling} {size}/{config.base_batch})"
    if not schedule.is_own:
        text += f", {config.warmup_steps} steps warm-up"
    return f"{text}, {schedule.name}"


def _checked_factor(name: str, function: Callable[..., Any], step: int, arguments: Mapping[str, Any]) -> float:
    cause: Exception | None = None
    try:
        factor = float(function(step, **arguments))
        reason = f"it returned {factor}, which is not a factor of at least 0"
        if math.isfinite(factor) and factor >= 0:
            return factor
    except Exception as error:
        cause = error
        reason = f"{type(error).__name__}: {error}"
    raise UserError(
        f"the schedule {name} failed for step {step}: {reason}",
        where=_WHERE,
        fix="a function of the step, numbered from 0, that returns a factor of optim.lr; it may also take total_steps",
    ) from cause


_MOMENTUM = 0.9  # the momentum of the optimizer that schedulers get


@dataclass
class _Scheduler:
    """Calls a scheduler class, such as the classes of ``torch.optim.lr_scheduler``, with an optimizer of one
    parameter."""

    name: str
    make: Callable[..., Any]
    peak: float
    args: Mapping[str, Any]
    _scheduler: LRScheduler | None = field(default=None, init=False)
    _step: int = field(default=0, init=False)

    def __call__(self, step: int) -> float:
        if self._scheduler is None or step < self._step:
            self._scheduler = self._build()
            self._step = 0
        optimizer = self._scheduler.optimizer
        while self._step < step:
            optimizer.step()  # torch warns if a scheduler is ahead of its optimizer
            self._scheduler.step()
            self._step += 1
        if optimizer.param_groups[0]["momentum"] != _MOMENTUM:
            raise UserError(
                f"{self.name} changes the momentum, but only its learning rates are used",
                where=_WHERE,
                fix=f"'{_WHERE}={{_target_: {self.name}, args: {{cycle_momentum: false}}}}'",
            )
        return float(optimizer.param_groups[0]["lr"])

    def _build(self) -> LRScheduler:
        parameter = torch.nn.Parameter(torch.zeros(1, device="cpu"))
        try:
            scheduler = self.make(torch.optim.SGD([parameter], lr=self.peak, momentum=_MOMENTUM), **self.args)
        except Exception as error:
            raise UserError(
                f"{self.name} could not be built: {type(error).__name__}: {error}",
                where=_WHERE,
                fix=f"'{_WHERE}={{_target_: {self.name}, args: {{NAME: VALUE}}}}'",
            ) from error
        if isinstance(scheduler, LRScheduler) and "metrics" not in inspect.signature(type(scheduler).step).parameters:
            return scheduler
        raise UserError(
            f"{self.name} returned {type(scheduler).__name__}, which is not a scheduler that depends on the step alone",
            where=_WHERE,
            fix="a class derived from torch.optim.lr_scheduler.LRScheduler, or a function of the step",
        )


LR_SCALINGS = ("none", "linear", "sqrt")


def peak_rate(config: OptimConfig, batch_size: int) -> float:
    """Returns the highest learning rate of a run with ``batch_size`` samples per step.

    ``linear`` (Goyal et al. 2017, arXiv:1706.02677): lr x batch / base_batch. ``sqrt`` (Krizhevsky 2014,
    arXiv:1404.5997; for Adam Malladi et al. 2022, arXiv:2205.10287): lr x sqrt(batch / base_batch).
    """
    ratio = batch_size / config.base_batch
    match config.lr_scaling:
        case "none":
            return config.lr
        case "linear":
            return config.lr * ratio
        case "sqrt":
            return config.lr * math.sqrt(ratio)
    raise UserError(
        f"unknown learning rate scaling {config.lr_scaling!r}",
        where="optim.lr_scaling",
        fix=f"use one of {' | '.join(LR_SCALINGS)}",
    )


def rate(config: OptimConfig, peak: float, step: int, total_steps: int) -> float:
    """Returns the learning rate of step ``step`` in [0, ``total_steps``).

    It rises linearly over ``warmup_steps`` (step 0 has 1 / warmup_steps of the peak) and then follows the schedule. All
    schedules except ``constant`` reach ``min_lr_ratio`` x peak at the last step. ``cosine``: Loshchilov and Hutter
    2016, arXiv:1608.03983. ``wsd`` (warm-up, stable, decay: Hu et al. 2024, arXiv:2404.06395) falls linearly during the
    last ``decay_share`` of all steps.
    """
    warmup = config.warmup_steps
    lowest = config.min_lr_ratio
    if step < warmup:
        return peak * (step + 1) / warmup
    match config.schedule:
        case "constant":
            return peak
        case "linear":
            decayed = _progress(step, warmup, total_steps - 1)
            return peak * (1.0 - (1.0 - lowest) * decayed)
        case "cosine":
            decayed = 0.5 * (1.0 - math.cos(math.pi * _progress(step, warmup, total_steps - 1)))
            return peak * (1.0 - (1.0 - lowest) * decayed)
        case "wsd":
            begin = max(warmup, total_steps - math.ceil(config.decay_share * total_steps) - 1)
            return peak * (1.0 - (1.0 - lowest) * _progress(step, begin, total_steps - 1))
    raise UserError(
        f"unknown learning rate schedule {config.schedule!r}",
        where="optim.schedule",
        fix=f"use one of {' | '.join(SCHEDULES)}",
    )


def _progress(step: int, begin: int, end: int) -> float:
    """Returns the fraction of [begin, end] that has passed at ``step``, clamped to [0, 1]."""
    if step <= begin:
        return 0.0
    return min(1.0, (step - begin) / max(1, end - begin))
