"""Simulates one step of a pipeline, event by event, in the order in which the schedule runs it. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_train.layout.layout import Layout
from hpc_train.layout.orders import BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD, Action, PipelineShape


@dataclass(frozen=True)
class Event:
    """An action of a rank with its begin and end, in seconds from the begin of the step."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The events of each rank."""

    ranks: tuple[tuple[Event, ...], ...]

    @property
    def seconds(self) -> float:
        return max(events[-1].end for events in self.ranks)

    @property
    def busy(self) -> float:
        """Returns the seconds in which the busiest rank computes."""
        return max(sum(event.end - event.begin for event in events) for events in self.ranks)


def step_seconds(
    layout: Layout, forwards: Sequence[float], backwards: Sequence[float], messages: Sequence[float]
) -> float:
    """Returns the seconds from the first forward to the last backward of a step.

    Steps of many micro-batches repeat themselves, so their middle is extrapolated from two shorter steps.

    Args:
        forwards: the seconds of a forward of each stage for one micro-batch; ``backwards`` those of a backward.
        messages: the seconds of a message from each stage to the next one.
    """
    count, turn = layout.micro_batches, layout.pp
    short = count - max(0, count - 3 * layout.stages) // turn * turn
    seconds = simulate(layout, short, forwards, backwards, messages).seconds
    if short == count:
        return seconds
    longer = simulate(layout, short + turn, forwards, backwards, messages).seconds
    return seconds + (longer - seconds) * (count - short) / turn


def simulate(
    layout: Layout, micro_batches: int, forwards: Sequence[float], backwards: Sequence[float], messages: Sequence[float]
) -> Timeline:
    """Returns when each rank computes what in a step of ``micro_batches``.

    An action begins when its rank has ended the action before it and its inputs have arrived.

    Raises:
        ValueError: the order of the schedule is unknown, or its ranks wait for each other.
    """
    order = layout.pipeline.order
    if order is None:
        raise ValueError(f"the order of the schedule {layout.schedule} is unknown")
    shape = PipelineShape(layout.pp, layout.stages_per_rank, micro_batches)
    orders = [order(shape, rank) for rank in range(layout.pp)]
    arrived: dict[tuple[bool, int, int], float] = {}  # when forwards (True) and backwards can begin
    events: list[list[Event]] = [[] for _ in orders]
    left = sum(map(len, orders))
    while left:
        before = left
        for own, actions in zip(events, orders, strict=True):
            left -= _run(actions, own, arrived, forwards, backwards, messages)
        if left == before:
            raise ValueError(f"the ranks of the schedule {layout.schedule} wait for each other")
    return Timeline(tuple(map(tuple, events)))


def _run(
    actions: Sequence[Action],
    events: list[Event],
    arrived: dict[tuple[bool, int, int], float],
    forwards: Sequence[float],
    backwards: Sequence[float],
    messages: Sequence[float],
) -> int:
    """Appends the events of a rank until it waits for another one; returns their number."""
    began, last = len(events), len(forwards) - 1
    clock = events[-1].end if events else 0.0
    for action in actions[began:]:
        work, stage, batch = action
        if work == FORWARD:
            ready = arrived.get((True, stage, batch)) if stage else 0.0
        else:
            ready = clock if work == BACKWARD_WEIGHT else arrived.get((False, stage, batch))
        if ready is None:
            break
        begin = max(ready, clock)
        clock = begin + _duration(work, stage, forwards, backwards)
        events.append(Event(action, begin, clock))
        if work == FORWARD:
            arrived[(True, stage + 1, batch) if stage < last else (False, stage, batch)] = clock + (
                messages[stage] if stage < last else 0.0
            )
        elif work != BACKWARD_WEIGHT and stage:
            arrived[False, stage - 1, batch] = clock + messages[stage - 1]
    return len(events) - began


def _duration(work: str, stage: int, forwards: Sequence[float], backwards: Sequence[float]) -> float:
    """Returns the seconds of a pass; the gradients of inputs and those of weights are half of a backward each."""
    if work == FORWARD:
        return forwards[stage]
    return backwards[stage] if work == FULL_BACKWARD else backwards[stage] / 2
