"""The long form only: pipelines of sleeping layers, whose bubble is what theory says."""

from __future__ import annotations

import pytest

from benchmarks.pipeline_bubble import SCHEDULES, compare
from tests.checkpoint.progress import LONG

MARGIN = 0.03  # of the step, for the work of the host; this machine may be busy


@pytest.mark.skipif(not LONG, reason="in the long form, HPC_TRAIN_LONG=1")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_bubble_is_what_theory_says(schedule: str, ranks: int) -> None:
    measured, theory = compare(schedule, ranks, seconds=0.1)
    assert theory - 0.01 < measured < theory + MARGIN
