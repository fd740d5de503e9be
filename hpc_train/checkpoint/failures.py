"""Models failures of a training run: published failure rates, the best checkpoint interval, the share of useful time.

Failures occur at a constant rate per GPU-hour, independently of each other, and each one interrupts the whole run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class PublishedRate:
    """Holds the failures per GPU-hour that a publication reports."""

    name: str
    per_gpu_hour: float
    source: str


LLAMA_3 = PublishedRate(
    "Llama 3 405B, 419 unexpected interruptions of 16,384 H100 in 54 days",
    419 / (16_384 * 54 * 24),
    "https://arxiv.org/abs/2407.21783",
)
RSC_1 = PublishedRate(
    "RSC-1, 6.50 failures per 1,000 days of a node of 8 A100",
    6.50e-3 / (8 * 24),
    "https://arxiv.org/abs/2410.21680",
)
RSC_2 = PublishedRate(
    "RSC-2, 2.34 failures per 1,000 days of a node of 8 A100",
    2.34e-3 / (8 * 24),
    "https://arxiv.org/abs/2410.21680",
)
PRIOR_PER_GPU_HOUR = 2.7e-5  # failures; between those of Llama 3 and of RSC-1
RECOVERY_S = 120.0  # time to detect a failure and restart


def best_interval(cost_s: float, durable_s: float, failures_per_gpu_hour: float, gpus: int) -> float:
    """Returns the interval between checkpoints that loses the least time, at least the time until a save is durable.

    It is sqrt(2 s (M + R)) (Young 1974; Daly 2006), with s the seconds that a save blocks training, M the mean time
    between failures of this many GPUs and R the time to detect a failure and restart. The optimum is flat: a factor of
    two in any of these values hardly matters.
    """
    between = between_failures(failures_per_gpu_hour, gpus)
    return max(durable_s, math.sqrt(2 * cost_s * (between + RECOVERY_S)))


def between_failures(failures_per_gpu_hour: float, gpus: int) -> float:
    """Returns the mean time between failures of a training run on ``gpus`` GPUs, in seconds."""
    if failures_per_gpu_hour:
        return 3600 / (failures_per_gpu_hour * gpus)
    return math.inf


@dataclass(frozen=True)
class Saves:
    """Holds the costs of saving and restarting, in seconds.

    Attributes:
        every_s: the useful work between the starts of two saves.
        blocked_s: the time for which a save blocks training.
        durable_s: the time from the start of a save until a restart can use it.
        restart_s: the time from a failure until training continues, including the time to read the checkpoint.
    """

    every_s: float
    blocked_s: float
    durable_s: float
    restart_s: float


@dataclass(frozen=True)
class Shares:
    """Holds the average shares of the time of a training run; their sum is 1."""

    useful: float
    saves: float
    lost_work: float
    restarts: float


_LARGEST = 700.0  # exponent of a float


def shares(saves: Saves, between_failures_s: float) -> Shares:
    """Returns the shares of the time if a failure occurs every ``between_failures_s`` seconds on average.

    The useful share is Daly's, t / (M exp(R / M) (exp((t + s) / M) - 1)), with t the interval of saves, s the seconds
    that a save blocks, R the restart and M the time between failures (https://doi.org/10.1016/j.future.2004.11.016).
    Until a save is durable, a failure loses the work since the save before; this time counts like a longer restart.
    """
    period = saves.every_s + saves.blocked_s
    if math.isinf(between_failures_s):
        return Shares(saves.every_s / period, saves.blocked_s / period, 0.0, 0.0)
    restarts = -math.expm1(-saves.restart_s / between_failures_s)
    delay = (saves.restart_s + saves.durable_s - saves.blocked_s) / between_failures_s
    if delay + period / between_failures_s > _LARGEST:  # practically no save is reached
        return Shares(0.0, 0.0, 1 - restarts, restarts)
    elapsed = between_failures_s * math.exp(delay) * math.expm1(period / between_failures_s)
    useful = saves.every_s / elapsed
    saved = saves.blocked_s / elapsed
    return Shares(useful, saved, 1 - useful - saved - restarts, restarts)
