"""Decides how many micro-batches of a step each replica computes (``batch.balance``). It does not import torch.

The lines of metrics have the times of all ranks without their waits, the same on every rank, so all ranks decide the
same at the same step. A replica is as slow as its slowest rank. Micro-batches move only if the step becomes shorter by
more than ``LEAST_GAIN``, which also moves them back when a rank has recovered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean, median
from typing import Any

from hpc_train.layout.layout import Layout
from hpc_train.train.watch.stragglers import RankTimes

LEAST_GAIN = 0.05  # of the time of a step
LEAST_STEPS = 20  # of a decision
LEAST_LINES = 3  # lines of metrics of a decision
SHOWN = 16  # replicas in a message


@dataclass(frozen=True)
class Move:
    """Describes a new assignment.

    Attributes:
        counts: the micro-batches that each replica computes from now on.
        before: the same until now.
        seconds: the time of a micro-batch on each replica.
        gain: the share of the time of a step that the new assignment saves.
    """

    counts: tuple[int, ...]
    before: tuple[int, ...]
    seconds: tuple[float, ...]
    gain: float

    def details(self) -> dict[str, Any]:
        """Returns the details of the event."""
        times = _listed([f"{1e3 * seconds:.3g}" for seconds in self.seconds])
        message = (
            f"the replicas compute {_listed(self.counts)} micro-batches of a step instead of {_listed(self.before)}: "
            f"they take {times} ms for each, so a step becomes {self.gain:.0%} shorter"
        )
        seconds = [round(seconds, 6) for seconds in self.seconds]
        return {"counts": [*self.counts], "micro_batch_s": seconds, "message": message}


@dataclass
class ReplicaBalance:
    """Follows the times of the replicas of ``layout`` from line to line.

    Attributes:
        moves: whether micro-batches may move.
        counts: the micro-batches that each replica computes; equally many at the start of an attempt.
        since: the number of steps before the first one whose time is used; None until the first line, which includes
            the start-up.
    """

    layout: Layout
    moves: bool
    counts: tuple[int, ...] = field(init=False)
    since: int | None = field(default=None, init=False)
    _lines: deque[tuple[int, tuple[float, ...]]] = field(default_factory=deque, init=False)  # (steps, seconds)

    def __post_init__(self) -> None:
        replicas = self.layout.dp // self.layout.lockstep_ranks
        self.counts = (self.layout.micro_batches,) * replicas

    def begin(self, step: int) -> None:
        """Ignores the times of the steps before ``step``."""
        self.since = step
        self._lines.clear()

    def look(self, step: int, rows: Sequence[RankTimes]) -> tuple[float, ...] | None:
        """Adds the times up to ``step``, and returns the seconds of a micro-batch on each replica: the medians over
        the newest lines; None if these are too few, or the waits of the ranks are unknown."""
        steps = rows[0].steps
        if self.since is None:
            self.since = step
        if steps == 0 or step - steps < self.since:
            return None
        work = [_work_s(row) for row in rows]
        replicas: list[list[float]] = [[] for _ in self.counts]
        for rank, seconds in enumerate(work):
            if seconds is None:
                return None
            replicas[self._replica_of(rank)].append(seconds)
        times = (max(seconds) / steps / count for seconds, count in zip(replicas, self.counts, strict=True))
        self._lines.append((steps, tuple(times)))
        if len(self._lines) < LEAST_LINES or sum(steps for steps, _ in self._lines) < LEAST_STEPS:
            return None
        while len(self._lines) > LEAST_LINES and sum(steps for steps, _ in islice(self._lines, 1, None)) >= LEAST_STEPS:
            self._lines.popleft()
        return tuple(median(of_replica) for of_replica in zip(*(times for _, times in self._lines), strict=True))

    def decide(self, seconds: Sequence[float]) -> Move | None:
        """Returns a better assignment for the ``seconds`` of a micro-batch on each replica, and takes it; None if there
        is none."""
        counts = best_counts(seconds, self.layout)
        gain = 1 - self._step_s(counts, seconds) / self._step_s(self.counts, seconds)
        if gain <= LEAST_GAIN:
            return None
        move = Move(counts, self.counts, tuple(seconds), gain)
        self.counts = counts
        return move

    def cost(self, seconds: Sequence[float]) -> float:
        """Returns the share of the time of a step that would be saved if work could be divided at will."""
        return 1 - 1 / (max(seconds) * fmean(1 / replica_s for replica_s in seconds))

    def _step_s(self, counts: Sequence[int], seconds: Sequence[float]) -> float:
        idle = _idle_micro_batches(self.layout)
        return max((count + idle) * replica_s for count, replica_s in zip(counts, seconds, strict=True))

    def _replica_of(self, rank: int) -> int:
        dp_rank = rank // (self.layout.cp * self.layout.tp) % self.layout.dp
        return dp_rank // self.layout.lockstep_ranks


def _listed(values: Sequence[object]) -> str:
    return "|".join(map(str, values[:SHOWN])) + "|..." * (len(values) > SHOWN)


def best_counts(seconds: Sequence[float], layout: Layout) -> tuple[int, ...]:
    """Returns the micro-batches of each replica with which the slowest replica ends first.

    Each replica begins with the fewest possible; the next ones go to the replica that would end first with them,
    or of several ones to that with the fewest.

    Args:
        seconds: the time of a micro-batch on each replica.
    """
    possible = layout.possible_counts()
    idle = _idle_micro_batches(layout)
    counts = [possible.start] * len(seconds)
    while sum(counts) < layout.micro_batches * len(seconds):
        ends = [
            ((count + possible.step + idle) * replica_s, count)
            for count, replica_s in zip(counts, seconds, strict=True)
        ]
        counts[ends.index(min(ends))] += possible.step
    return tuple(counts)


def _idle_micro_batches(layout: Layout) -> float:
    """Returns the idle time of a rank in a step of a pipeline, in the time of a micro-batch."""
    return layout.micro_batches * layout.bubble_share / (1 - layout.bubble_share)


def _work_s(row: RankTimes) -> float | None:
    """Returns the seconds of the steps without waits for other ranks."""
    if row.steps_s is None or row.communication_s is None:
        return None
    return max(1e-9, row.steps_s - row.communication_s - (row.bubble_s or 0.0))
