"""Reads what torch's flight recorders say about the last collectives of a rank.

torch has a recorder for NCCL and another one for gloo. Newer versions list the entries of NCCL in both dumps, so each
entry is read once. The backends count separately, and torch may give groups of different ranks the same name. The name
of a group is therefore made of its backend, the name that torch gave it and, where recorded, its ranks. It is the same
on all ranks of the group.

With gloo, the host enters a collective when its data is there, so the time at which an entry was created says when the
rank arrived. With NCCL that is the time at which the host put the collective in a queue, which says nothing about the
GPU. The GPU's own start and duration are only recorded with TORCH_NCCL_ENABLE_TIMING=1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GLOO = "gloo"


@dataclass(frozen=True)
class Collective:
    """One operation of a rank in a process group.

    Attributes:
        group: a name that is the same on all ranks of the group, and different for all other groups.
        description: torch's description of the group, e.g. ``mesh_dp``.
        number: the number of the collective in its group; a message between two ranks has the number of the collective
            before it.
        operation: its kind, e.g. ``all_reduce``.
        shapes: the shapes of its inputs.
        created_s: when the host called it, in seconds since the epoch.
        completed_s: when torch noticed that the device had completed it; None with gloo or before.
        duration_s: how long the device took, which includes waiting for the other ranks; None if it was not measured.
        has_started: whether the device has begun, where this is recorded, i.e. in groups with durations.
    """

    group: str
    description: str
    number: int
    operation: str
    shapes: str
    is_message: bool
    is_finished: bool
    created_s: float
    completed_s: float | None = None
    duration_s: float | None = None
    has_started: bool = False

    @property
    def is_on_host(self) -> bool:
        """Returns whether the host performs it, so that ``created_s`` is the time at which the rank arrived."""
        return not is_queued(self.group)


def is_queued(group: str) -> bool:
    """Returns whether the collectives of a group are queued for a device, which begins them later."""
    return not group.startswith(f"{GLOO} ")


def read_collectives(dumps: bytes) -> list[Collective]:
    """Parses a JSON object with the dump of each recorder (``train/processes.py``)."""
    seen: set[tuple[Any, ...]] = set()
    found: list[Collective] = []
    for dump in json.loads(dumps or b"{}").values():
        for entry in dump.get("entries", ()):
            key = (*entry["process_group"], entry["profiling_name"], entry["record_id"], entry["time_created_ns"])
            if key not in seen:
                seen.add(key)
                found.append(_collective(entry, dump.get("pg_config", {})))
    return found


def _collective(entry: Mapping[str, Any], groups: Mapping[str, Mapping[str, str]]) -> Collective:
    name, description = entry["process_group"]
    backend, _, operation = entry["profiling_name"].partition(":")
    ranks = groups.get(name, {}).get("ranks", "")
    milliseconds = entry.get("duration_ms")
    return Collective(
        group=f"{backend} {name} {ranks}".rstrip(),
        description=description,
        number=entry["collective_seq_id"],
        operation=operation,
        shapes=str(entry["input_sizes"]),
        is_message=entry["is_p2p"],
        # an entry is retired when torch's watchdog thread has seen its end
        is_finished=entry["retired"] or entry["state"] == "completed",
        created_s=entry["time_created_ns"] / 1e9,
        completed_s=(entry["time_discovered_completed_ns"] or 0) / 1e9 or None,
        duration_s=None if milliseconds is None else milliseconds / 1e3,
        has_started=bool(entry["time_discovered_started_ns"]) or entry["state"] == "completed",
    )
