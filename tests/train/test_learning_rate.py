"""Learning rates as functions of the step."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from hpc_train.config.schema import OptimConfig
from hpc_train.train.optimizers.learning_rate import peak_rate, rate


def rates(total: int, **settings: object) -> list[float]:
    config = OptimConfig(**{"lr": 1.0, "warmup_steps": 0} | settings)  # type: ignore[arg-type]
    return [rate(config, 1.0, step, total) for step in range(total)]


def test_scaling_against_the_base_batch() -> None:
    assert peak_rate(OptimConfig(lr=0.1, lr_scaling="none", base_batch=256), 1024) == 0.1
    assert peak_rate(OptimConfig(lr=0.1, lr_scaling="linear", base_batch=256), 1024) == pytest.approx(0.4)
    assert peak_rate(OptimConfig(lr=0.1, lr_scaling="sqrt", base_batch=256), 1024) == pytest.approx(0.2)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_warm_up_rises_in_equal_steps(schedule: str) -> None:
    assert rates(10, schedule=schedule, warmup_steps=4)[:4] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
@pytest.mark.parametrize("total", [2, 3, 7, 100])
def test_the_last_step_has_the_lowest_rate_and_it_never_rises(schedule: str, total: int) -> None:
    found = rates(total, schedule=schedule, min_lr_ratio=0.1)
    assert found[0] == 1.0
    assert found[-1] == pytest.approx(0.1)
    assert all(later <= earlier for earlier, later in pairwise(found))


def test_the_shapes() -> None:
    assert rates(5, schedule="constant") == [1.0] * 5
    assert rates(5, schedule="linear", min_lr_ratio=0.0) == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])
    expected = [0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(5)]
    assert rates(5, schedule="cosine", min_lr_ratio=0.0) == pytest.approx(expected)
    found = rates(11, schedule="wsd", min_lr_ratio=0.0, decay_share=0.4)
    assert found[:6] == [1.0] * 6
    assert found[5:] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.0])


def test_warm_up_as_long_as_the_run_and_runs_of_one_step() -> None:
    assert rates(4, schedule="cosine", warmup_steps=4) == [0.25, 0.5, 0.75, 1.0]
    assert rates(1, schedule="cosine") == [1.0]
