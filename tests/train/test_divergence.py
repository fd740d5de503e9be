"""When a run has diverged, and when it only had a bad step."""

from __future__ import annotations

import math

from hpc_train.config.schema import TrainConfig
from hpc_train.train.divergence import LEAST, DivergenceWatch


def watching(losses: list[float], mads: float = 20.0) -> DivergenceWatch:
    """After ``losses``, one logged every ten steps."""
    watch = DivergenceWatch(TrainConfig(spike_mads=mads, nonfinite_limit=5))
    assert [watch.look(10 * number, loss, 0) for number, loss in enumerate(losses, 1)] == [None] * len(losses)
    return watch


FALLING = [4.0 * 0.98**number for number in range(LEAST + 4)]
LAST = 10 * len(FALLING)


def test_three_high_losses_in_a_row_are_a_jump_since_the_last_good_one() -> None:
    watch = watching(FALLING)
    assert watch.look(LAST + 10, 60.0, 0) is None and not watch.calm
    assert watch.look(LAST + 20, 60.0, 0) is None
    found = watch.look(LAST + 30, 60.0, 0)
    assert found is not None and found.since == LAST and not found.fatal
    assert watch.calm, "what was told is forgotten"


def test_one_high_loss_is_none_and_leaves_no_trace() -> None:
    watch = watching(FALLING)
    before = watch.state()["losses"]
    for loss in (60.0, 60.0, math.nan):
        assert watch.look(LAST + 10, loss, 0) is None
    assert watch.state()["losses"] == before
    assert watch.look(LAST + 20, FALLING[-1], 0) is None and watch.calm


def test_few_losses_and_equal_losses_and_no_limit() -> None:
    assert watching([1.0] * (LEAST - 3) + [100.0] * 3).calm, "too few to tell"
    assert watching([1.0] * LEAST + [1.01] * 3).calm, "they were all but equal"
    assert watching([*FALLING, 1e6, 1e6, 1e6], mads=0.0).calm


def test_steps_without_a_finite_gradient() -> None:
    watch = watching(FALLING)
    assert watch.look(LAST + 10, math.nan, 4) is None
    found = watch.look(LAST + 12, math.nan, 6)
    assert found is not None and found.since == LAST + 6 and found.fatal


def test_the_watch_goes_on_after_a_checkpoint() -> None:
    watch = watching(FALLING)
    watch.look(LAST + 10, 60.0, 0)
    other = watching([])
    other.load_state(watch.state())
    assert other.look(LAST + 20, 60.0, 0) is None
    found = other.look(LAST + 30, 60.0, 0)
    assert found is not None and found.since == LAST
