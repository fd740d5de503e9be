"""Computes the order of forward and backward passes on each rank of a pipeline for torch's schedules, the number of
micro-batches in flight, and the bubble. It does not import torch.

The planner simulates a step from these orders. Tests compare them with the actions of torch's schedules.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Literal, NamedTuple, TypeAlias

FORWARD: Literal["FORWARD"] = "FORWARD"
FULL_BACKWARD: Literal["FULL_BACKWARD"] = "FULL_BACKWARD"
BACKWARD_INPUT: Literal["BACKWARD_INPUT"] = "BACKWARD_INPUT"  # gradients of inputs only
BACKWARD_WEIGHT: Literal["BACKWARD_WEIGHT"] = "BACKWARD_WEIGHT"  # gradients of weights only
Work: TypeAlias = Literal["FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT"]  # torch's names


class PipelineShape(NamedTuple):
    """Describes the size of a pipeline: its ranks, the stages of each rank, and the micro-batches of a step."""

    ranks: int
    stages_per_rank: int
    micro_batches: int


class Action(NamedTuple):
    """Describes what a rank computes: a pass of one stage for one micro-batch."""

    work: Work
    stage: int
    micro_batch: int


def gpipe(shape: PipelineShape, rank: int) -> tuple[Action, ...]:
    """Returns all forwards, then all backwards (arXiv:1811.06965)."""
    batches = range(shape.micro_batches)
    forwards = (Action(FORWARD, rank, batch) for batch in batches)
    return (*forwards, *(Action(FULL_BACKWARD, rank, batch) for batch in batches))


def one_forward_one_backward(shape: PipelineShape, rank: int) -> tuple[Action, ...]:
    """Returns the order of 1F1B (arXiv:2104.04473, figure 4)."""
    batches = range(shape.micro_batches)
    ahead = min(shape.micro_batches, shape.ranks - rank) - 1
    forwards = [Action(FORWARD, rank, batch) for batch in batches]
    return _alternate(forwards, [Action(FULL_BACKWARD, rank, batch) for batch in batches], ahead)


def interleaved(shape: PipelineShape, rank: int) -> tuple[Action, ...]:
    """Returns the order of interleaved 1F1B, several stages per rank (arXiv:2104.04473, section 2.2)."""
    ahead = (shape.stages_per_rank - 1) * _round(shape) + 2 * (shape.ranks - 1 - rank)
    forwards, backwards = _turns(shape, rank, FORWARD), _turns(shape, rank, FULL_BACKWARD)
    return _alternate(forwards, backwards, ahead)


def interleaved_zero_bubble(shape: PipelineShape, rank: int) -> tuple[Action, ...]:
    """Returns the interleaved order in which the gradients of weights follow ``rank`` backwards later
    (arXiv:2401.10241)."""
    ahead = (shape.stages_per_rank - 1) * _round(shape) + shape.ranks - 1 - rank
    forwards, backwards = _turns(shape, rank, FORWARD), _turns(shape, rank, BACKWARD_INPUT)
    weights = iter([Action(BACKWARD_WEIGHT, action.stage, action.micro_batch) for action in backwards])
    done = 0
    order: list[Action] = []
    for action in _alternate(forwards, backwards, ahead):
        order.append(action)
        if action.work == BACKWARD_INPUT:
            done += 1
            if done > rank:
                order.append(next(weights))
    return (*order, *weights)


def zero_bubble_v(shape: PipelineShape, rank: int) -> tuple[Action, ...]:
    """Returns the order of ZB-V, where rank r has the stages r and 2 p - 1 - r (arXiv:2401.10241, section 6).

    The order assumes at least 2 p - 1 micro-batches; with fewer, the micro-batches that do not exist are left out.
    """
    order = _zero_bubble_v(shape.ranks, max(2 * shape.ranks - 1, shape.micro_batches), rank)
    return tuple(action for action in order if action.micro_batch < shape.micro_batches)


def _zero_bubble_v(ranks: int, micro_batches: int, rank: int) -> Iterator[Action]:
    down, up = rank, 2 * ranks - 1 - rank  # the stages of the rank in the first and the second half of the model
    counts: Counter[tuple[Work, int]] = Counter()

    def act(work: Work, stage: int) -> Action:
        counts[work, stage] += 1
        return Action(work, stage, counts[work, stage] - 1)

    def backward(stage: int) -> Iterator[Action]:
        yield act(BACKWARD_INPUT, stage)
        yield act(BACKWARD_WEIGHT, stage)

    for _ in range(2 * (ranks - rank) - 1):
        yield act(FORWARD, down)
    for _ in range(rank):
        yield act(FORWARD, up)
        yield act(FORWARD, down)
    for _ in range(ranks - rank):
        yield act(FORWARD, up)
        yield from backward(up)
    while counts[FORWARD, up] < micro_batches:
        if counts[FORWARD, down] < micro_batches:
            yield act(FORWARD, down)
        yield from backward(down)
        yield act(FORWARD, up)
        yield from backward(up)
    for _ in range(rank):
        yield act(BACKWARD_INPUT, down)
        yield act(BACKWARD_INPUT, up)
    for _ in range(ranks - rank):
        yield from backward(down)
    for stage in (up, down):
        while counts[BACKWARD_WEIGHT, stage] < counts[BACKWARD_INPUT, stage]:
            yield act(BACKWARD_WEIGHT, stage)


def dual_pipe_v(shape: PipelineShape, rank: int) -> tuple[Action, ...]:
    """Returns the order of DualPipeV, with the stages of ZB-V (arXiv:2412.19437, section 3.2;
    github.com/deepseek-ai/DualPipe). In the middle of the order, forwards of one stage alternate with full backwards of
    the other.
    """
    return tuple(_dual_pipe_v(shape, rank))


class _Passes:
    """Numbers the passes of a rank's stages.

    Attributes:
        waiting: the gradients of weights that are not yet computed.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[bool, int]] = Counter()
        self.waiting: deque[Action] = deque()

    def act(self, work: Work, stage: int) -> Action:
        key = work == FORWARD, stage
        self._counts[key] += 1
        action = Action(work, stage, self._counts[key] - 1)
        if work == BACKWARD_INPUT:
            self.waiting.append(Action(BACKWARD_WEIGHT, stage, action.micro_batch))
        return action

    def forwards(self, stage: int) -> int:
        return self._counts[True, stage]


def _dual_pipe_v(shape: PipelineShape, rank: int) -> Iterator[Action]:
    down, up = rank, 2 * shape.ranks - 1 - rank
    following = shape.ranks - 1 - rank  # ranks
    passes = _Passes()
    act = passes.act
    waiting = passes.waiting
    for _ in range(2 * following):
        yield act(FORWARD, down)
    for _ in range(rank + 1):
        yield act(FORWARD, down)
        yield act(FORWARD, up)
    for _ in range(following):
        yield act(BACKWARD_INPUT, up)
        yield waiting.popleft()
        yield act(FORWARD, up)
    while passes.forwards(up) < shape.micro_batches:
        if passes.forwards(down) < shape.micro_batches:
            yield act(FORWARD, down)
        yield act(FULL_BACKWARD, up)
        yield act(FORWARD, up)
        yield act(FULL_BACKWARD, down)
    for number in range(2 * (rank + 1)):
        yield act(FULL_BACKWARD if number <= rank else BACKWARD_INPUT, down if number % 2 else up)
    for _ in range(following):
        yield waiting.popleft()
        yield act(BACKWARD_INPUT, down)
    yield from waiting


def _round(shape: PipelineShape) -> int:
    """Returns the number of micro-batches after which a rank proceeds to its next stage."""
    return shape.micro_batches // max(1, shape.micro_batches // shape.ranks)


def _turns(shape: PipelineShape, rank: int, work: Work) -> list[Action]:
    """Returns the passes of kind ``work`` of all stages of a rank for all micro-batches; backwards begin with the last
    stage."""
    turn = _round(shape)
    stages = [rank + shape.ranks * local for local in range(shape.stages_per_rank)]
    if work != FORWARD:
        stages.reverse()
    counts = Counter[int]()
    order = []
    for number in range(shape.micro_batches * shape.stages_per_rank):
        stage = stages[number // turn % len(stages)]
        order.append(Action(work, stage, counts[stage]))
        counts[stage] += 1
    return order


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> tuple[Action, ...]:
    """Returns ``ahead`` forwards, then forwards and backwards in alternation, then the remaining backwards."""
    ahead = min(ahead, len(forwards))
    left = iter(backwards)
    pairs = chain.from_iterable(zip(forwards[ahead:], islice(left, len(forwards) - ahead), strict=True))
    return (*forwards[:ahead], *pairs, *left)


def filled(shape: PipelineShape, forwards: int) -> tuple[int, ...]:
    """Returns how many of a rank's first ``forwards`` forwards belong to each of its stages, in rounds of ``ranks``
    forwards."""
    turn = shape.ranks
    stages = range(shape.stages_per_rank)
    forwards = min(forwards, len(stages) * shape.micro_batches)
    rounds, rest = divmod(forwards, turn * len(stages))
    return tuple(rounds * turn + min(turn, max(0, rest - stage * turn)) for stage in stages)


def interleaved_in_flight(shape: PipelineShape, rank: int) -> tuple[int, ...]:
    return filled(shape, (shape.stages_per_rank - 1) * shape.ranks + 2 * (shape.ranks - 1 - rank) + 1)


def bubble(shape: PipelineShape) -> float:
    """Returns (p - 1) / (v m + p - 1) (arXiv:1811.06965, section 2.3; interleaved: arXiv:2104.04473, section 2.2)."""
    waiting = shape.ranks - 1
    return waiting / (shape.stages_per_rank * shape.micro_batches + waiting)


def zero_bubble(shape: PipelineShape) -> float:
    """Returns the share of the bubble (p - 1) (TF + TB - TW) of arXiv:2401.10241, table 2; gradients of weights fill
    the rest."""
    waiting = shape.ranks - 1
    return waiting / (3 * shape.stages_per_rank * shape.micro_batches + waiting)
