"""The simulated step of a pipeline against the bubbles of the schedules' rows, and against longer simulations."""

from __future__ import annotations

import pytest

from hpc_train.layout.layout import Layout
from hpc_train.layout.orders import FORWARD
from hpc_train.layout.techniques import SCHEDULES
from hpc_train.planner.prediction import simulate, step_seconds

SHAPES = [(2, 1), (4, 1), (2, 2), (4, 2), (3, 3)]


def layouts(schedule: str) -> list[Layout]:
    row = SCHEDULES[schedule]
    least, most = row.stages_per_rank
    shapes = [(pp, v) for pp, v in SHAPES if least <= v <= most]
    counts = {"one": (1,)}.get(row.micro_batches)
    return [
        Layout(1, pp, 1, 1, "ddp", schedule, v, count, 1)
        for pp, v in shapes
        for count in counts or (pp * v, 6 * pp * v)
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equal_stages_wait_as_long_as_the_row_of_the_schedule_says(schedule: str) -> None:
    for layout in layouts(schedule):
        stages = layout.stages
        seconds = step_seconds(layout, [1.0] * stages, [2.0] * stages, [0.0] * (stages - 1))
        busy = 3.0 * layout.micro_batches * layout.stages_per_rank
        assert 1 - busy / seconds == pytest.approx(layout.bubble_share), layout


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "sequential"])
def test_the_middle_of_a_long_step_is_extrapolated_exactly(schedule: str) -> None:
    for layout in layouts(schedule):
        stages = layout.stages
        forwards = [1.0 + 0.3 * stage for stage in range(stages)]
        backwards, messages = [2.1 * seconds for seconds in forwards], [0.05] * (stages - 1)
        long = Layout(1, layout.pp, 1, 1, "ddp", schedule, layout.stages_per_rank, 12 * stages, 1)
        whole = simulate(long, long.micro_batches, forwards, backwards, messages).seconds
        assert step_seconds(long, forwards, backwards, messages) == pytest.approx(whole, rel=2e-3), long


def test_a_pass_begins_when_its_message_has_arrived_and_its_rank_is_free() -> None:
    layout = Layout(1, 2, 1, 1, "ddp", "1f1b", 1, 2, 1)
    first, second = simulate(layout, 2, [1.0, 1.0], [2.0, 2.0], [0.5]).ranks
    assert [(event.begin, event.end) for event in second] == [(1.5, 2.5), (2.5, 4.5), (4.5, 5.5), (5.5, 7.5)]
    assert [event.begin for event in first if event.action.work == FORWARD] == [0.0, 1.0]
    assert [event.begin for event in first if event.action.work != FORWARD] == [5.0, 8.0]


def test_a_schedule_of_unknown_order_cannot_be_simulated() -> None:
    layout = Layout(1, 2, 1, 1, "ddp", "tests.extensions.package.dualpipev:SCHEDULE", 2, 8, 1)
    with pytest.raises(ValueError, match="the order of the schedule"):
        simulate(layout, 8, [1.0] * 4, [2.0] * 4, [0.0] * 3)
