"""Where layers and stages go, and that the forward pass for evaluation cannot deadlock."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from hpc_train.config.schema import GPTConfig
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout
from hpc_train.layout.techniques import SCHEDULES
from hpc_train.models.build import build_model
from hpc_train.models.model import Model
from hpc_train.parallel.pipeline.engine import forward_order
from hpc_train.parallel.pipeline.schedules import planned_schedule
from hpc_train.parallel.pipeline.split import cut, split_layers, stage_of


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
