"""Computes the learning rate of each step.

It is a pure function of the step, so it has no state to save or resume. A scheduler class of torch is stepped from the
start of the run to the wanted step.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from hpc_train.config.import_path import locate, refuse_unknown
from hpc_train.config.schema import OptimConfig
from hpc_train.errors import UserError
from hpc_train.layout.optimizers import SCHEDULES, Schedule, parse_schedule

_WHERE = "optim.schedule"


def learning_rates(config: OptimConfig, batch_size: int, total_steps: int) -> Callable[[int], float]:
    """Returns the function from a step in [0, ``total_steps``) to its learning rate.

    Args:
        batch_size: samples per step, for ``optim.lr_scaling``.

    Raises:
        UserError: a schedule of the user cannot be imported or called.
    """
    peak, schedule = peak_rate(config, batch_size), parse_schedule(config.schedule)
    if not schedule.is_own:
        return partial(_built_in, config, peak, total_steps)
    return _own(schedule, peak, total_steps)


def describe_rates(config: OptimConfig, size: int) -> str:
    """Returns the highest learning rate and the schedule in words, for ``size`` samples per step."""
    schedule, text = parse_schedule(config.schedule), f"{peak_rate(config, size):g}"
    if config.lr_scaling != "none":
        text += f" ({config.lr:g} x {config.lr_scaling} {size}/{config.base_batch})"
    return (
        f"{text}, {schedule.name}"
        if schedule.is_own
        else f"{text}, {config.warmup_steps} steps warm-up, {schedule.name}"
    )


def _built_in(config: OptimConfig, peak: float, total_steps: int, step: int) -> float:
    return rate(config, peak, step, total_steps)


def _own(schedule: Schedule, peak: float, total_steps: int) -> Callable[[int], float]:
    found = locate(schedule.name, _WHERE)
    parameters = inspect.signature(found).parameters
    first = next(iter(parameters), "step")
    if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        refuse_unknown(
            schedule.name, [*schedule.args], [name for name in parameters if name != first], f"{_WHERE}.args"
        )
    given = {"total_steps": total_steps} if "total_steps" in parameters else {}
    arguments = given | dict(schedule.args)
    if isinstance(found, type) or first == "optimizer":
        return _Scheduler(schedule.name, found, peak, arguments)
    return partial(_factor_of, schedule.name, found, peak, arguments)


def _factor_of(name: str, function: Callable[..., Any], peak: float, args: Mapping[str, Any], step: int) -> float:
    try:
        factor = float(function(step, **args))
    except Exception as error:
        raise _failed(name, f"for step {step}: {type(error).__name__}: {error}") from error
    if not (math.isfinite(factor) and factor >= 0):
        raise _failed(name, f"for step {step}: it returned {factor}, which is not a factor of at least 0")
    return peak * factor


def _failed(name: str, reason: str) -> UserError:
    return UserError(
        f"the schedule {name} failed {reason}",
        where=_WHERE,
        fix="a function of the step, numbered from 0, that returns a factor of optim.lr; it may also take total_steps",
    )


_MOMENTUM = 0.9  # of the optimizer that schedulers get


@dataclass
class _Scheduler:
    """Calls a scheduler class such as those of ``torch.optim.lr_scheduler`` with an optimizer of one parameter."""

    name: str
    make: Callable[..., Any]
    peak: float
    args: Mapping[str, Any]
    _scheduler: LRScheduler | None = field(default=None, init=False)
    _step: int = field(default=0, init=False)

    def __call__(self, step: int) -> float:
        if self._scheduler is None or step < self._step:
            self._scheduler, self._step = self._made(), 0
        while self._step < step:
            self._scheduler.optimizer.step()  # torch warns if a scheduler is ahead of its optimizer
            self._scheduler.step()
            self._step += 1
        self._check_momentum(self._scheduler)
        return float(self._scheduler.optimizer.param_groups[0]["lr"])

    def _check_momentum(self, scheduler: LRScheduler) -> None:
        if scheduler.optimizer.param_groups[0]["momentum"] != _MOMENTUM:
            raise UserError(
                f"{self.name} changes the momentum, but only its learning rates are used",
                where=_WHERE,
                fix=f"'{_WHERE}={{_target_: {self.name}, args: {{cycle_momentum: false}}}}'",
            )

    def _made(self) -> LRScheduler:
        optimizer = torch.optim.SGD(
            [torch.nn.Parameter(torch.zeros(1, device="cpu"))], lr=self.peak, momentum=_MOMENTUM
        )
        try:
            made = self.make(optimizer, **self.args)
        except Exception as error:
            raise UserError(
                f"{self.name} could not be built: {type(error).__name__}: {error}",
                where=_WHERE,
                fix=f"'{_WHERE}={{_target_: {self.name}, args: {{NAME: VALUE}}}}'",
            ) from error
        if isinstance(made, LRScheduler) and "metrics" not in inspect.signature(type(made).step).parameters:
            return made
        raise UserError(
            f"{self.name} returned {type(made).__name__}, which is not a scheduler that depends on the step alone",
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

    It rises linearly over ``warmup_steps`` (step 0 has 1 / warmup_steps of the peak) and then follows the schedule; all
    but ``constant`` reach ``min_lr_ratio`` x peak at the last step. ``cosine``: Loshchilov and Hutter 2016,
    arXiv:1608.03983. ``wsd`` (warm-up, stable, decay: Hu et al. 2024, arXiv:2404.06395) falls linearly in the last
    ``decay_share`` of all steps.
    """
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    return peak * _factor(config, step, total_steps)


def _factor(config: OptimConfig, step: int, total_steps: int) -> float:
    last, lowest = total_steps - 1, config.min_lr_ratio
    match config.schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - (1.0 - lowest) * _progress(step, config.warmup_steps, last)
        case "cosine":
            decayed = 0.5 * (1.0 - math.cos(math.pi * _progress(step, config.warmup_steps, last)))
            return 1.0 - (1.0 - lowest) * decayed
        case "wsd":
            begin = max(config.warmup_steps, total_steps - math.ceil(config.decay_share * total_steps) - 1)
            return 1.0 - (1.0 - lowest) * _progress(step, begin, last)
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
