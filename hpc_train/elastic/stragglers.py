"""Which rank the others wait for, step after step: by the times at which ranks enter the same collective.

torch's flight recorder has these times. The ranks of a group leave a collective together, so the arrival of each at the
next one tells how long its own work took. Stages of a pipeline do different work: only ranks that do the same (data and
tensor parallel) are compared. Nobody is killed for being late.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from hpc_train.elastic.workers import Worker
from hpc_train.measure.streak import Streak

FIRST_S, MOST_S = 5.0, 60.0  # between two questions, doubling: each costs a worker some ten milliseconds
LEAST_SHARE = 0.2  # of the time, that the others wait for it
LEAST_BLAME = 0.75  # of all waiting, that is for this rank: on a busy machine every rank is late at times
FEWEST = 20  # collectives
IN_A_ROW = 2  # windows
SAME_WORK = ("mesh_dp", "mesh_tp")  # how the descriptions of such groups begin
WORLD = "default_pg"  # takes the place of a group with all ranks

Arrivals = Mapping[tuple[str, int], Mapping[int, float]]  # collective (group, number) → rank → seconds


@dataclass(frozen=True)
class Straggler:
    """``share`` of the time the others waited for ``rank``; ``late_s``: its median lateness at a collective."""

    rank: int
    share: float
    late_s: float

    def details(self) -> dict[str, Any]:
        message = f"the other ranks wait for rank {self.rank} {self.share:.0%} of the time"
        return {"share": round(self.share, 3), "late_s": round(self.late_s, 4), "message": message}


@dataclass
class StragglerWatch:
    """Asks the workers of a node for their collectives now and then, and compares the answers."""

    _pause: float = field(default=FIRST_S, init=False)
    _pipeline: bool = field(default=False, init=False)
    _next: float | None = field(default=None, init=False)
    _asked: dict[int, int] = field(default_factory=dict, init=False)
    _since: float = field(default=0.0, init=False)  # the collectives before are judged
    _ranks: Streak[int] = field(default_factory=lambda: Streak(IN_A_ROW), init=False)

    def begin(self, pipeline: bool) -> None:
        """A new attempt, with pipeline stages or without."""
        self._pipeline = pipeline
        self._next, self._pause, self._since = None, FIRST_S, 0.0
        self._ranks = Streak(IN_A_ROW)
        self._asked.clear()

    def look(self, workers: Sequence[Worker], now: float) -> list[Straggler]:
        """A straggler that ``IN_A_ROW`` windows agree on and that was not reported before."""
        if self._next is None:
            self._next = now + self._pause
        if self._asked:
            return self._read(workers)
        if now >= self._next and len(workers) > 1:
            self._pause = min(2 * self._pause, MOST_S)
            self._next = now + self._pause
            self._asked = {worker.rank: worker.block.ask() for worker in workers}
        return []

    def _read(self, workers: Sequence[Worker]) -> list[Straggler]:
        answers = {worker.rank: worker.block.answer_to(self._asked.get(worker.rank, 0)) for worker in workers}
        found = {rank: answer for rank, answer in answers.items() if answer is not None}
        if len(found) < len(answers):
            return []
        self._asked.clear()
        arrivals = arrivals_of(found, self._since, self._pipeline)
        self._since = max((max(times.values()) for times in arrivals.values()), default=self._since)
        straggler = find_straggler(arrivals)
        confirmed = self._ranks.confirms(None if straggler is None else straggler.rank)
        return [straggler] if confirmed and straggler is not None else []


def arrivals_of(dumps: Mapping[int, bytes], since: float = 0.0, pipeline: bool = True) -> Arrivals:
    """The collectives after ``since`` that several of these ranks have entered."""
    compared = SAME_WORK if pipeline else (*SAME_WORK, WORLD)
    found: dict[tuple[str, int], dict[int, float]] = {}
    for rank, dump in dumps.items():
        for entry in json.loads(dump or b"{}").get("entries", []):
            (name, description), created = entry["process_group"], entry["time_created_ns"] / 1e9
            if description.startswith(compared) and not entry["is_p2p"] and created > since:
                found.setdefault((name, entry["collective_seq_id"]), {})[rank] = created
    return {key: times for key, times in found.items() if len(times) > 1}


def find_straggler(arrivals: Arrivals) -> Straggler | None:
    """The one rank that the others wait for in most collectives and for much of the time; None without one."""
    if len(arrivals) < FEWEST:
        return None
    waits: dict[int, list[float]] = {}
    for times in arrivals.values():
        last = max(times, key=lambda rank: times[rank])
        others = [time for rank, time in times.items() if rank != last]
        waits.setdefault(last, []).append(times[last] - median(others))
    moments = [time for times in arrivals.values() for time in times.values()]
    rank = max(waits, key=lambda rank: sum(waits[rank]))
    late, all_late = sum(waits[rank]), sum(sum(found) for found in waits.values())
    share = late / max(max(moments) - min(moments), 1e-9)
    if share < LEAST_SHARE or late < LEAST_BLAME * all_late:
        return None
    return Straggler(rank, share, median(waits[rank]))
