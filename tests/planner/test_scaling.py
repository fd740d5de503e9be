"""The time that failures cost, against a simulation and published figures; scaling, against the sources' table."""

from __future__ import annotations

import random

import pytest

from hpc_train.planner.failures import LLAMA_3, RSC_1, RSC_2, Saves, between_failures, shares


def simulated_share(saves: Saves, between: float, failures: int) -> float:
    """Returns the useful share of a training that fails at random, event by event."""
    clock = kept = 0.0
    draw = random.Random(0).expovariate
    for _ in range(failures):
        left = draw(1 / between)
        clock += left
        left -= saves.restart_s  # a failure during the restart begins it again
        period = saves.every_s + saves.blocked_s
        lag = saves.durable_s - saves.blocked_s
        if left >= period + lag:
            kept += saves.every_s * ((left - lag) // period)
    return kept / clock


@pytest.mark.parametrize("between", [1e5, 1e4, 2e3])
@pytest.mark.parametrize("durable", [10.0, 60.0])
def test_the_useful_share_is_that_of_a_simulated_training(between: float, durable: float) -> None:
    saves = Saves(every_s=600.0, blocked_s=10.0, durable_s=durable, restart_s=120.0)
    found = shares(saves, between)
    assert found.useful == pytest.approx(simulated_share(saves, between, 40_000), rel=0.02)
    assert found.useful + found.saves + found.lost_work + found.restarts == pytest.approx(1)
    assert min(vars(found).values()) >= 0


def test_published_times_between_failures_and_goodput_come_out() -> None:
    """RSC-1: 1.8 h projected for 16,384 GPUs (arXiv:2410.21680). Llama 3: more than 90 % (arXiv:2407.21783)."""
    assert between_failures(RSC_1.per_gpu_hour, 16_384) == pytest.approx(1.8 * 3600, rel=0.01)
    assert RSC_2.per_gpu_hour < LLAMA_3.per_gpu_hour < RSC_1.per_gpu_hour
    saves = Saves(every_s=600.0, blocked_s=5.0, durable_s=30.0, restart_s=300.0)
    assert 0.9 < shares(saves, between_failures(LLAMA_3.per_gpu_hour, 16_384)).useful < 0.97
    assert shares(saves, between_failures(0.0, 8)).lost_work == 0
    assert shares(saves, 0.1).useful == 0
