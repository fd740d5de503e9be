"""Finds the rank that causes a hang: the one that the others wait for.

A ``RankState`` is plain data, so the states of several nodes can be combined.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hpc_train.elastic.decision import WorkerFailure

CONTROL = "control"  # group of ``train/step.py``, whose messages are posted without waiting


@dataclass(frozen=True)
class GroupState:
    """The state of one rank in one process group.

    Attributes:
        entered: number of collectives entered so far.
        inside: whether the rank is inside one.
        operation: kind and input shapes of the last one.
        before: how often it entered the same operation before, as far back as recorded.
    """

    entered: int
    inside: bool
    operation: str = ""
    before: int = 0


@dataclass(frozen=True)
class RankState:
    """The observed state of one rank at one moment.

    Attributes:
        seconds: time since its last sign of life.
        arrived_step: the step before which it last posted its message to the others.
        process: the kernel's state letter (R, S, D, T, …); empty for a process that is gone.
        answered: whether its interpreter answered the question for its collectives.
        groups: by name of the process group; the group of the control messages only during a save.
    """

    rank: int
    node: str
    step: int
    phase: str
    seconds: float
    arrived_step: int
    process: str
    answered: bool
    groups: Mapping[str, GroupState] = field(default_factory=dict)

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> RankState:
        """Parses the JSON of ``dataclasses.asdict``."""
        groups = {name: GroupState(**state) for name, state in value["groups"].items()}
        return cls(**{**value, "groups": groups})


def group_states(dump: bytes, saves: bool = False) -> dict[str, GroupState]:
    """Parses the JSON of torch's flight recorder (version 2.x).

    Args:
        saves: the rank is in a save, whose collectives use the group of the control messages.
    """
    collectives: dict[str, list[dict[str, Any]]] = {}
    for entry in json.loads(dump or b"{}").get("entries", []):
        name, description = entry["process_group"]
        if (saves or description != CONTROL) and not entry["is_p2p"]:
            collectives.setdefault(name, []).append(entry)
    return {name: _group_state(entries) for name, entries in collectives.items()}


def _group_state(entries: Sequence[Mapping[str, Any]]) -> GroupState:
    last = max(entries, key=lambda entry: entry["collective_seq_id"])
    operations = [f"{entry['profiling_name']} {entry['input_sizes']}" for entry in entries]
    own = f"{last['profiling_name']} {last['input_sizes']}"
    inside = not all(entry["retired"] for entry in entries)
    return GroupState(last["collective_seq_id"], inside, own, operations.count(own) - 1)


def culprit(states: Sequence[RankState]) -> tuple[int | None, str]:
    """Returns the rank that the others wait for and the reason; None if no rank of ``states`` is behind the others."""
    for word, suspects in (
        ("is stopped by a signal", [state for state in states if state.process in ("T", "t")]),
        (
            "does not respond in its interpreter, while others do",
            _minority(states, [s for s in states if not s.answered]),
        ),
        ("is behind the other ranks", _minority(states, _behind(states))),
        ("did not enter the collective that the others are in", _not_in_collective(states)),
        ("entered a different collective than the others", _in_other_collective(states)),
        ("waits for storage", _minority(states, [state for state in states if state.process == "D"])),
    ):
        if suspects:
            return min(suspects, key=lambda state: state.rank).rank, word
    return None, "no rank is behind the others"


def find_culprit(hangs: Sequence[WorkerFailure]) -> WorkerFailure:
    """Combines the reports of a hang from several nodes; returns the failure of the rank that all wait for."""
    states = [RankState.parse(state) for hang in hangs for state in hang.states]
    rank, reason = culprit(states)
    for hang in hangs:
        if rank is not None and rank in (state["rank"] for state in hang.states):
            return hang if hang.rank == rank and not hang.waits else _named(hang, rank, reason)
    return min(hangs, key=lambda hang: (hang.waits, hang.noticed))


def _named(hang: WorkerFailure, rank: int, reason: str) -> WorkerFailure:
    message = f"{hang.message.partition(';')[0]}; rank {rank} {reason}"
    return replace(hang, rank=rank, message=message, traceback=f"{message}\n{hang.traceback}", waits=False)


def _minority(states: Sequence[RankState], found: list[RankState]) -> list[RankState]:
    return found if len(found) < len(states) else []


def _behind(states: Sequence[RankState]) -> list[RankState]:
    first = min((state.step, state.arrived_step) for state in states)
    return [state for state in states if (state.step, state.arrived_step) == first]


def _not_in_collective(states: Sequence[RankState]) -> list[RankState]:
    """Returns the ranks that are behind another in some group and inside no collective themselves, i.e. not waiting."""
    furthest: dict[str, int] = {}
    for state in states:
        for name, group in state.groups.items():
            furthest[name] = max(furthest.get(name, 0), group.entered)
    behind = [s for s in states if any(group.entered < furthest[name] for name, group in s.groups.items())]
    return [state for state in behind if not any(group.inside for group in state.groups.values())] or behind


def _in_other_collective(states: Sequence[RankState]) -> list[RankState]:
    """Returns the rank whose operation differs from the others' at the same point of a group, the least usual one."""
    operations: dict[tuple[str, int], list[tuple[int, str, RankState]]] = {}
    for state in states:
        for name, group in state.groups.items():
            operations.setdefault((name, group.entered), []).append((group.before, group.operation, state))
    for found in operations.values():
        if len({operation for _, operation, _ in found}) > 1:
            return [min(found, key=lambda one: one[0])[2]]
    return []
