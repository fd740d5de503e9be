"""Computes the learning rate as a pure function of the step, so that it has no state to save or resume."""

from __future__ import annotations

import math

from hpc_train.config.schema import OptimConfig
from hpc_train.errors import UserError

LR_SCALINGS = ("none", "linear", "sqrt")
SCHEDULES = ("constant", "linear", "cosine", "wsd")


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
