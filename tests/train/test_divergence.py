"""When a run has diverged, and when it only had a bad step."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from hpc_train.config.schema import TrainConfig
from hpc_train.train.trainer import LEAST, NO_LOSS, DivergenceWatch
from tests.train.runs import frozen, run_attempt


def watching(losses: list[float], mads: float = 20.0) -> DivergenceWatch:
    """After ``losses``, one logged every ten steps."""
    watch = DivergenceWatch(TrainConfig(spike_mads=mads, nonfinite_limit=5))
    assert [watch.check(10 * number, loss, 0) for number, loss in enumerate(losses, 1)] == [None] * len(losses)
    return watch


FALLING = [4.0 * 0.98**number for number in range(LEAST + 4)]
LAST = 10 * len(FALLING)


def test_three_high_losses_in_a_row_are_a_jump_since_the_last_good_one() -> None:
    watch = watching(FALLING)
    assert watch.check(LAST + 10, 60.0, 0) is None and not watch.calm
    assert watch.check(LAST + 20, 60.0, 0) is None
    found = watch.check(LAST + 30, 60.0, 0)
    assert found is not None and found.since == LAST and not found.fatal
    assert watch.calm, "the earlier report is forgotten"


def test_one_high_loss_is_none_and_leaves_no_trace() -> None:
    watch = watching(FALLING)
    before = watch.state()["losses"]
    for loss in (60.0, 60.0, math.nan):
        assert watch.check(LAST + 10, loss, 0) is None
    assert watch.state()["losses"] == before
    assert watch.check(LAST + 20, FALLING[-1], 0) is None and watch.calm


def test_few_losses_and_equal_losses_and_no_limit() -> None:
    assert watching([1.0] * (LEAST - 3) + [100.0] * 3).calm, "too few losses"
    assert watching([1.0] * LEAST + [1.01] * 3).calm, "they were almost equal"
    assert watching([*FALLING, 1e6, 1e6, 1e6], mads=0.0).calm


def test_steps_without_a_finite_gradient() -> None:
    watch = watching(FALLING)
    assert watch.check(LAST + 10, math.nan, 4) is None
    found = watch.check(LAST + 12, math.nan, 6)
    assert found is not None and found.since == LAST + 6 and found.fatal


NAN = math.nan


@pytest.mark.parametrize(
    ("loss", "validation", "skipped", "scaled", "found"),
    [
        (2.0, 2.0, 0, False, None),
        (2.0, 2.0, 2, False, None),  # steps that a run gets over by itself
        (NAN, 2.0, 1, False, None),  # a single bad batch at the very end
        (2.0, 2.0, 4, True, None),  # fp16 looks for its scale
        (NAN, NAN, 1, True, (True, r"the loss of its last step, 210, is not finite; .* is step 200")),
        (NAN, 2.0, 4, False, (True, "the loss of its last step, 210, is not finite")),
        (math.inf, 2.0, 0, False, None),  # a target whose logit is masked: the gradients are finite
        (2.0, 2.0, 3, False, (True, "no gradient was finite in its last 3 steps")),
        (2.0, NAN, 0, False, (False, "the validation loss after the last step, 210, is not finite")),
    ],
)
def test_the_end_of_a_run(
    loss: float, validation: float, skipped: int, scaled: bool, found: tuple[bool, str] | None
) -> None:
    watch = watching(FALLING)
    assert watch.check(LAST + 10, loss, skipped) is None
    end = watch.at_end(LAST + 10, loss, validation, skipped, scaled)
    if found is None:
        assert end is None
    else:
        assert end is not None and end.fatal == found[0]
        assert re.search(found[1], end.reason), end.reason


def test_the_watch_goes_on_after_a_checkpoint() -> None:
    watch = watching(FALLING)
    watch.check(LAST + 10, 60.0, 0)
    other = watching([])
    other.load_state(watch.state())
    assert other.check(LAST + 20, 60.0, 0) is None
    found = other.check(LAST + 30, 60.0, 0)
    assert found is not None and found.since == LAST


def test_a_loss_of_zero_at_the_first_step_is_named(tmp_path: Path) -> None:
    """The cross-entropy of a vocabulary of one token; nothing can be learnt."""
    run = frozen(tmp_path / "run", "model.vocab_size=1", "data.vocab_size=1", "train.steps=2")
    assert run_attempt(run, 1) == [0]
    said = [event["message"] for event in run.read_events() if event["event"] == "warning"]
    assert said == [NO_LOSS]
