"""The rows of schedules against what torch's schedules plan: activations in flight, bubble and split backward."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from typing import get_args

import pytest
import torch

from hpc_train.config.schema import GPTConfig
from hpc_train.errors import UserError
from hpc_train.layout import orders
from hpc_train.layout.layout import Layout
from hpc_train.layout.orders import PipelineShape
from hpc_train.layout.partition import blocks_of, layers_of, partition, predict
from hpc_train.layout.techniques import KINDS, SCHEDULES, DataParallelKind, PipelineSchedule
from hpc_train.models.build import build_model
from hpc_train.models.model import Model
from hpc_train.parallel.pipeline.engine import forward_order
from hpc_train.parallel.pipeline.schedules import Action, count_in_flight, planned_schedule, recorded_actions
from hpc_train.parallel.pipeline.split import cut, split_layers, stage_of

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


def test_an_even_split_spares_the_ends() -> None:
    assert [len(held) for held in split_layers(8, 4)] == [2, 2, 2, 2]
    assert [len(held) for held in split_layers(9, 4)] == [2, 3, 2, 2]
    assert [len(held) for held in split_layers(10, 4)] == [2, 3, 3, 2]
    assert [len(held) for held in split_layers(11, 4)] == [3, 3, 3, 2]
    assert [len(held) for held in split_layers(3, 2)] == [2, 1]
    assert split_layers(5, 3, [1, 3, 1]) == (range(1), range(1, 4), range(4, 5))


@pytest.mark.parametrize("split", [[2, 2], [1, 2, 3], [4, 0, 1], [-1, 5, 1]])
def test_a_split_that_does_not_fit_is_refused(split: list[int]) -> None:
    with pytest.raises(UserError, match="must list 3 stages with 5 layers"):
        split_layers(5, 3, split)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(UserError, match="n_layers is 3, too few for 4 pipeline stages"):
        split_layers(3, 4)


def test_stages_go_round_in_a_loop_or_in_a_v() -> None:
    assert SCHEDULES["interleaved_1f1b"].place(2, 2) == (0, 1, 0, 1)
    assert SCHEDULES["zbv"].place(3, 2) == (0, 1, 2, 2, 1, 0)


def test_the_parts_of_a_cut_model_are_the_model() -> None:
    sizes = {"vocab_size": 8, "dim": 8, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 8}
    model = build_model(GPTConfig(n_layers=5, **sizes), 0)
    assert isinstance(model, Model)
    layers = split_layers(5, 3)
    parts = [cut(model, stage, layers) for stage in range(3)]
    names = [[name for name, _ in part.named_parameters()] for part in parts]
    assert sorted(name for held in names for name in held) == sorted(name for name, _ in model.named_parameters())
    for stage, held in enumerate(names):
        assert {stage_of(name, layers) for name in held} == {stage}
    assert all(parameter.is_meta for part in parts for parameter in part.parameters())
    assert model.stem is not None and model.head is not None and len(model.layers) == 5
    assert parts[0].hidden_shape(torch.empty(2, 7, device="meta")) == (2, 7, 8)


PLACEMENTS = [
    *((SCHEDULES["interleaved_1f1b"].place(pp, stages), pp) for pp in (2, 3, 4) for stages in (1, 2, 3)),
    *((SCHEDULES["zbv"].place(pp, 2), pp) for pp in (2, 3, 4)),
]


@pytest.mark.parametrize(("placement", "ranks"), PLACEMENTS)
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 9])
def test_a_forward_pass_ends_even_where_every_send_waits(
    placement: tuple[int, ...], ranks: int, micro_batches: int
) -> None:
    """Plays all ranks with messages that need both ends at once, which is harder than what any backend does."""
    programs = [deque(_messages(rank, placement, micro_batches)) for rank in range(ranks)]
    computed: set[tuple[int, int]] = set()
    while any(programs):
        before = sum(map(len, programs))
        for program in programs:
            _advance(program, programs, computed)
        assert sum(map(len, programs)) < before, f"deadlock: {[program[0] for program in programs if program]}"
    assert len(computed) == len(placement) * micro_batches


def _messages(rank: int, placement: tuple[int, ...], micro_batches: int) -> list[tuple[str, int, int]]:
    """The actions of ``rank``, with the sends that follow from its computes."""
    held = [stage for stage, owner in enumerate(placement) if owner == rank]
    actions = []
    for action, stage, micro in forward_order(held, placement, micro_batches):
        actions.append((action, stage, micro))
        if action == "compute" and stage + 1 < len(placement) and placement[stage + 1] != rank:
            actions.append(("send", stage, micro))
    return actions


def _advance(
    program: deque[tuple[str, int, int]],
    programs: list[deque[tuple[str, int, int]]],
    computed: set[tuple[int, int]],
) -> None:
    if not program:
        return
    action, stage, micro = program[0]
    if action == "compute":
        assert stage == 0 or (stage - 1, micro) in computed, "computes before its input is there"
        computed.add((stage, micro))
        program.popleft()
    elif action == "send":
        receiver = next((other for other in programs if other and other[0] == ("receive", stage + 1, micro)), None)
        if receiver is not None:
            program.popleft()
            receiver.popleft()


def messages_of_links(one: Layout) -> dict[frozenset[int], dict[int, list[tuple[str, int, int]]]]:
    """Returns the messages by link and end, in the order in which torch issues them: kind, sender, micro-batch."""
    links: dict[frozenset[int], dict[int, list[tuple[str, int, int]]]] = {}
    sender = {"SEND_F": 0, "RECV_F": -1, "SEND_B": 0, "RECV_B": 1}  # relative to the stage of the action
    other = {"SEND_F": 1, "RECV_F": -1, "SEND_B": -1, "RECV_B": 1}
    for rank, actions in planned_schedule(one).pipeline_order_with_comms.items():
        for action in actions:
            name, stage = action.computation_type.name, action.stage_index
            if name in sender:
                link = frozenset((rank, one.placement[stage + other[name]]))
                message = (name[-1], stage + sender[name], action.microbatch_index)
                links.setdefault(link, {}).setdefault(rank, []).append(message)
    return links


@pytest.mark.parametrize("pp", [3, 4, 8])
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"])
def test_both_ends_of_a_link_issue_its_messages_in_one_order(schedule: str, pp: int) -> None:
    """On GPUs a message waits for the one before it on its link, so another order would be a deadlock."""
    links = messages_of_links(Layout(1, pp, 1, 1, "allreduce", schedule, 2, 2 * pp, 1))
    assert len(links) == (pp if schedule.startswith("interleaved") else pp - 1)
    for first, second in (ends.values() for ends in links.values()):
        assert first == second


def splits(blocks: int, stages: int) -> Iterator[tuple[range, ...]]:
    for cuts in combinations(range(1, blocks), stages - 1):
        yield tuple(range(first, end) for first, end in pairwise((0, *cuts, blocks)))


@pytest.mark.parametrize("seed", range(40))
def test_no_other_split_has_a_faster_slowest_stage(seed: int) -> None:
    draw = random.Random(seed)
    blocks = draw.randint(2, 9)
    stages = draw.randint(1, blocks)
    seconds = [draw.choice([0, 1, 1, 1, draw.random(), 7]) for _ in range(blocks)]
    memory = [draw.randint(0, 4) for _ in range(blocks)]
    caps = [draw.randint(3, 16) for _ in range(stages)]

    def fits(stage: int, held: range) -> bool:
        return sum(memory[block] for block in held) <= caps[stage]

    def costs(split: tuple[range, ...]) -> list[float]:
        return [sum(seconds[block] for block in held) for held in split]

    allowed = [split for split in splits(blocks, stages) if all(fits(*pair) for pair in enumerate(split))]
    found = partition(seconds, stages, fits)
    if not allowed:
        assert found is None
        return
    assert found in allowed
    least = min(max(costs(split)) for split in allowed)
    assert max(costs(found)) == pytest.approx(least)
    even = min(sum(c**2 for c in costs(split)) for split in allowed if max(costs(split)) <= least + 1e-9)
    assert sum(cost**2 for cost in costs(found)) == pytest.approx(even)


def test_a_heavy_head_stands_alone() -> None:
    found = partition([1, 1, 1, 1, 1, 9], 2)
    assert found is not None and layers_of(found) == (range(4), range(4, 4))


@pytest.mark.parametrize("counts", [[2, 3], [0, 5], [5, 0], [0, 5, 0], [1, 1, 3]])
def test_blocks_and_layers_say_the_same(counts: list[int]) -> None:
    layers = split_layers(5, len(counts), counts)
    blocks = blocks_of(layers)
    assert layers_of(blocks) == layers
    assert [block for held in blocks for block in held] == list(range(7))


@pytest.mark.parametrize(("pp", "per_rank", "micro_batches"), [(2, 1, 8), (4, 1, 16), (4, 2, 8), (3, 3, 9)])
def test_equal_stages_have_the_known_bubble(pp: int, per_rank: int, micro_batches: int) -> None:
    stages = pp * per_rank
    blocks = tuple(range(stage, stage + 1) for stage in range(stages))
    found = predict([2.0] * stages, blocks, SCHEDULES["interleaved_1f1b"].place(pp, per_rank), micro_batches)
    assert found.bubble_share == pytest.approx((pp - 1) / (per_rank * micro_batches + pp - 1))
    assert found.imbalance == pytest.approx(1)


@pytest.mark.parametrize("seed", range(10))
def test_uneven_stages_take_as_long_as_a_simulated_pipeline(seed: int) -> None:
    """GPipe's forward half, tick by tick: a stage begins a micro-batch when it and the stage before are through."""
    draw = random.Random(seed)
    stages, micro_batches = draw.randint(2, 5), draw.randint(5, 12)
    seconds = [draw.uniform(1, 3) for _ in range(stages)]
    through = [0.0] * stages
    for _ in range(micro_batches):
        arrived = 0.0
        for stage in range(stages):
            arrived = through[stage] = max(arrived, through[stage]) + seconds[stage]
    found = predict(seconds, tuple(range(s, s + 1) for s in range(stages)), tuple(range(stages)), micro_batches)
    assert found.step_s == pytest.approx(through[-1])
    assert found.imbalance == pytest.approx(max(seconds) * stages / sum(seconds))
