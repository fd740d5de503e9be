"""The parts of the benchmark that time nothing: its layouts, and what it calls a good choice."""

from __future__ import annotations

import pytest

from benchmarks.auto_choice import CHOSEN, MODELS, layout_of, layouts_of, result, table


@pytest.mark.long_form(10)  # a benchmark
def test_the_chosen_layout_is_measured_once_beside_others() -> None:
    assert len(MODELS) == 10
    layouts = layouts_of("gpt-1m", "v100")
    found = [layout_of("gpt-1m", overrides) for overrides in layouts.values()]
    assert len(found) == len(set(found)) >= 5 and next(iter(layouts)) == CHOSEN


def test_a_choice_is_good_within_a_tenth_or_the_noise() -> None:
    close, noisy, slow = (
        result("gpt-1m", "a", {CHOSEN: chosen, "ddp": [1.0, 1.0, 1.0]})
        for chosen in ([1.08, 1.09, 1.08], [0.9, 1.2, 1.3], [1.2, 1.21, 1.2])
    )
    assert [close.is_good, noisy.is_good, slow.is_good] == [True, True, False]
    assert "2 of 3 choices are within 10%" in table([close, noisy, slow])
