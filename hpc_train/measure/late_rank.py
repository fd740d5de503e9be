"""Which rank of several nodes the others wait for, by what all ranks waited for collectives since the last line.

An agent sees the ranks of its own node only, and the clocks of nodes differ; how long each rank waited does not depend
on them. Ranks leave a collective together, so the one that comes last has waited least. Stages of a pipeline do
different work: only the ranks of one stage are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from hpc_train.config.layout import Layout
from hpc_train.measure.ranks import RankTimes, stages

LEAST_SHARE = 0.2  # of the time, that the others wait for it
LEAST_BLAME = 0.75  # of that, by which it is also later than the next: one slow rank, and not a busy cluster
IN_A_ROW = 3  # lines of metrics, after the first of an attempt, which has the start of everything in it


@dataclass(frozen=True)
class LateRank:
    """``share`` of the time the others of its stage wait for ``rank``, on ``node``."""

    rank: int
    node: str
    share: float

    def details(self) -> dict[str, Any]:
        """For the event."""
        message = f"the other ranks wait for rank {self.rank} on {self.node} {self.share:.0%} of the time"
        return {"rank": self.rank, "node": self.node, "share": round(self.share, 3), "message": message}


@dataclass
class LateRankWatch:
    """Looks at the times of all ranks with every line of metrics of an attempt. ``nodes``: the node of each rank."""

    layout: Layout
    nodes: Sequence[str]
    _lines: int = field(default=0, init=False)
    _suspect: tuple[int, int] = field(default=(-1, 0), init=False)  # rank, lines in a row
    _named: set[int] = field(default_factory=set, init=False)

    def look(self, rows: Sequence[RankTimes]) -> LateRank | None:
        """A rank that ``IN_A_ROW`` lines agree on and that was not named before."""
        self._lines += 1
        found = find_late_rank(rows, self.layout) if self._lines > 1 else None
        if found is None:
            self._suspect = -1, 0
            return None
        rank, share = found
        before, count = self._suspect
        self._suspect = rank, count + 1 if rank == before else 1
        if self._suspect[1] < IN_A_ROW or rank in self._named:
            return None
        self._named.add(rank)
        return LateRank(rank, self.nodes[rank], share)


def find_late_rank(rows: Sequence[RankTimes], layout: Layout) -> tuple[int, float] | None:
    """The rank that the others of its stage wait for most, and for which share of the time; None without one."""
    found = [_latest(range(begin, end), rows) for begin, end in stages(layout)]
    return max((late for late in found if late is not None), key=lambda late: late[1], default=None)


def _latest(ranks: range, rows: Sequence[RankTimes]) -> tuple[int, float] | None:
    waits = {rank: wait for rank in ranks if (wait := rows[rank].communication_s) is not None}
    if len(ranks) < 2 or len(waits) < len(ranks):
        return None
    least, following, *_ = sorted(waits, key=lambda rank: waits[rank])
    late_s = median(wait for rank, wait in waits.items() if rank != least) - waits[least]
    share = late_s / rows[least].seconds
    if share < LEAST_SHARE or waits[following] - waits[least] < LEAST_BLAME * late_s:
        return None
    return least, share
