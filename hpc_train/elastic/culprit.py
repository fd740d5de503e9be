"""Which rank a hang is due to: the one that the others wait for.

The agents of several nodes can put what they know together: a ``RankState`` is plain data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CONTROL = "control"  # the description of the group of ``train/control.py``: its messages are posted, not waited for


@dataclass(frozen=True)
class GroupState:
    """One rank in one process group: collectives entered so far, and whether it is inside one."""

    entered: int
    inside: bool


@dataclass(frozen=True)
class RankState:
    """What is known of one rank at one moment.

    Attributes:
        seconds: since its last sign of life.
        arrived_step: before which step it last posted its message to the others.
        process: the state letter of the kernel (R, S, D, T, …); empty for a process that is gone.
        answered: whether its interpreter could say what collectives it has entered.
        groups: by the name of the process group; without that of the control messages.
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
        """From the JSON of ``dataclasses.asdict``."""
        groups = {name: GroupState(**state) for name, state in value["groups"].items()}
        return cls(**{**value, "groups": groups})


def group_states(dump: bytes) -> dict[str, GroupState]:
    """From torch's flight recorder (version 2.x of its JSON)."""
    found: dict[str, GroupState] = {}
    for entry in json.loads(dump or b"{}").get("entries", []):
        name, description = entry["process_group"]
        if description != CONTROL and not entry["is_p2p"]:
            before = found.get(name, GroupState(0, False))
            entered = max(before.entered, entry["collective_seq_id"])
            found[name] = GroupState(entered, before.inside or not entry["retired"])
    return found


def culprit(states: Sequence[RankState]) -> tuple[int | None, str]:
    """The rank that the others wait for, and how one knows; None where none of ``states`` is behind the others."""
    for word, suspects in (
        ("is stopped by a signal", [state for state in states if state.process in ("T", "t")]),
        ("does not run its interpreter, while others do", _minority(states, [s for s in states if not s.answered])),
        ("is behind the other ranks", _minority(states, _behind(states))),
        ("did not enter the collective that the others are in", _outside(states)),
        ("waits for storage", _minority(states, [state for state in states if state.process == "D"])),
    ):
        if suspects:
            return min(suspects, key=lambda state: state.rank).rank, word
    return None, "no rank is behind the others"


def _minority(states: Sequence[RankState], found: list[RankState]) -> list[RankState]:
    return found if len(found) < len(states) else []


def _behind(states: Sequence[RankState]) -> list[RankState]:
    first = min((state.step, state.arrived_step) for state in states)
    return [state for state in states if (state.step, state.arrived_step) == first]


def _outside(states: Sequence[RankState]) -> list[RankState]:
    """Behind another rank in some group, and inside no collective itself: who waits is not who is waited for."""
    furthest: dict[str, int] = {}
    for state in states:
        for name, group in state.groups.items():
            furthest[name] = max(furthest.get(name, 0), group.entered)
    behind = [s for s in states if any(group.entered < furthest[name] for name, group in s.groups.items())]
    return [state for state in behind if not any(group.inside for group in state.groups.values())] or behind
