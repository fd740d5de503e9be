"""The rows of schedules against what torch's schedules plan: activations in flight, bubble and split backward."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from hpc_train.layout import orders
from hpc_train.layout.layout import Layout
from hpc_train.layout.orders import PipelineShape
from hpc_train.layout.techniques import KINDS, SCHEDULES, DataParallelKind, PipelineSchedule
from hpc_train.parallel.pipeline.schedules import Action, count_in_flight, planned_schedule, recorded_actions

SHAPES = [(2, 1), (4, 1), (2, 2), (4, 2), (3, 2), (4, 3)]


def layouts(schedule: str) -> list[Layout]:
    row = SCHEDULES[schedule]
    shapes = [(pp, v) for pp, v in SHAPES if row.stages_per_rank[0] <= v <= row.stages_per_rank[1]]
    counts = {"one": (1,)}.get(row.micro_batches)
    return [
        Layout(1, pp, 1, 1, "ddp", schedule, v, count, 1)
        for pp, v in shapes
        for count in counts or (pp * v, pp * v + pp, 6 * pp * v)
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_activations_in_flight_are_those_of_the_schedule(schedule: str) -> None:
    assert layouts(schedule)
    for layout in layouts(schedule):
        for rank, actions in enumerate(recorded_actions(layout)):
            stages = [stage for stage, owner in enumerate(layout.placement) if owner == rank]
            counted = count_in_flight(actions, stages)
            assert tuple(layout.in_flight(stage) for stage in stages) in counted, (layout, rank, counted)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_bubble_and_the_backward_are_those_of_the_schedule(schedule: str) -> None:
    for layout in layouts(schedule):
        ranks = recorded_actions(layout)
        assert waiting_share(ranks, layout.stages) == pytest.approx(layout.bubble_share), layout
        splits = any(action == "BACKWARD_INPUT" for actions in ranks for action, _ in actions)
        assert splits == SCHEDULES[schedule].splits_backward


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_planner_simulates_the_order_of_the_schedule(schedule: str) -> None:
    order = SCHEDULES[schedule].order
    assert order is not None
    for layout in layouts(schedule):
        shape = PipelineShape(layout.pp, layout.stages_per_rank, layout.micro_batches)
        for rank, planned in enumerate(recorded_actions(layout)):
            actions = order(shape, rank)
            assert [(action.work, action.stage) for action in actions] == planned, (layout, rank)
            assert all(takes_micro_batches_in_order(actions, stage) for _, stage in set(planned)), (layout, rank)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"])
def test_a_result_is_sent_before_the_next_pass(schedule: str) -> None:
    """As the planner assumes. Torch's own DualPipeV sends the result of a forward after the backward that follows."""
    for layout in layouts(schedule):
        for actions in planned_schedule(layout).pipeline_order_with_comms.values():
            computed, sent = None, 0
            for action in actions:
                name = action.computation_type.name
                if name in get_args(orders.Work):
                    sends = "SEND_F" if name == "FORWARD" else "SEND_B"
                    computed = sends, action.stage_index, action.microbatch_index
                elif name.startswith("SEND"):
                    sent += 1
                    assert (name, action.stage_index, action.microbatch_index) == computed, layout
                else:
                    assert name != "OVERLAP_F_B"
            assert sent


def takes_micro_batches_in_order(actions: tuple[orders.Action, ...], stage: int) -> bool:
    """Whether forwards and backwards of a stage take the micro-batches 0, 1, 2, ..., and each part of a backward its
    other part."""
    batches: dict[str, list[int]] = {work: [] for work in get_args(orders.Work)}
    backwards = []
    for action in actions:
        if action.stage == stage:
            batches[action.work].append(action.micro_batch)
            backwards += [action.micro_batch] if action.work in ("FULL_BACKWARD", "BACKWARD_INPUT") else []
    whole = [*range(len(backwards))]
    return batches["FORWARD"] == backwards == whole and batches["BACKWARD_INPUT"] == batches["BACKWARD_WEIGHT"]


def waiting_share(ranks: list[list[Action]], stages: int) -> float:
    """Of a step in which forwards, gradients of inputs and gradients of weights take one second each."""
    done: dict[tuple[str, int, int], float] = {}  # when each action of a stage on a micro-batch was through
    clocks, positions = [0.0] * len(ranks), [0] * len(ranks)
    numbers: dict[tuple[str, int], int] = {}
    while any(position < len(actions) for position, actions in zip(positions, ranks, strict=True)):
        before = list(positions)
        for rank, actions in enumerate(ranks):
            while positions[rank] < len(actions):
                action, stage = actions[positions[rank]]
                own = {"FORWARD": "F", "BACKWARD_WEIGHT": "W"}.get(action, "B")
                number = numbers.get((own, stage), 0)  # each stage takes its micro-batches in order
                needed = {"F": ("F", stage - 1, number), "W": ("B", stage, number), "B": ("B", stage + 1, number)}[own]
                if own == "B" and stage == stages - 1:
                    needed = ("F", stage, number)
                if needed[1] >= 0 and needed not in done:
                    break
                seconds = 2.0 if action == "FULL_BACKWARD" else 1.0
                clocks[rank] = max(clocks[rank], done.get(needed, 0.0)) + seconds
                done[own, stage, number] = clocks[rank]
                numbers[own, stage] = number + 1
                positions[rank] += 1
        assert positions != before, "the schedule waits for itself"
    work = sum({"FULL_BACKWARD": 2.0}.get(action, 1.0) for actions in ranks for action, _ in actions)
    return 1 - work / (max(clocks) * len(ranks))


def test_a_missing_fact_is_a_type_error() -> None:
    for row, kind in ((SCHEDULES["1f1b"], PipelineSchedule), (KINDS["ddp"], DataParallelKind)):
        for fact in vars(row):
            facts = {name: value for name, value in vars(row).items() if name != fact}
            with pytest.raises(TypeError, match=f"missing 1 required keyword-only argument: '{fact}'"):
                kind(**facts)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"placement": "v"}, "placement v has two stages per rank"),
        ({"stages_per_rank": (2, 3)}, "placement linear has one stage per rank"),
        ({"splits_backward": True}, "compiles and ops_checkpointing must be False"),
        ({"bubble": lambda shape: 1.5}, "bubble returns 1.5"),
        ({"in_flight": lambda shape, rank: (1, 1)}, r"in_flight returns \(1, 1\) for 1 stages"),
        ({"torch_class": "Schedule1F1B"}, "not module:attribute"),
        ({"placement": "ring"}, "placement is 'ring'"),
    ],
)
def test_facts_that_contradict_each_other_are_refused(facts: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SCHEDULES["1f1b"], **facts)  # type: ignore[arg-type]
    for wrong in ({"shards": frozenset({"optimizer"})}, {"offloads": ("all",)}):
        with pytest.raises(ValueError, match=r"row 'ddp'"):
            replace(KINDS["ddp"], **wrong)  # type: ignore[arg-type]
