"""Divides ``launch.array_parallelism`` among the job arrays of a sweep.

Slurm limits how many tasks of one array run at a time (``--array=0-99%8``), but a sweep becomes several arrays if its
jobs request different resources or are more than the site allows in one array. Each array gets a share of the limit by
its number of jobs. If there are more arrays than jobs that may run at a time, arrays also wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """When the jobs of one array may run.

    Attributes:
        at_once: how many of them run at a time; a text for no limit.
        after: the index of the array whose end it waits for; None if it does not wait.
    """

    at_once: int | str
    after: int | None = None


def divide(sizes: Sequence[int], limit: int | str) -> list[Turn]:
    """Returns the turn of each array, so that at most ``limit`` jobs run at a time.

    Args:
        sizes: the number of jobs of each array, in the order of submission.
        limit: a text for no limit.
    """
    if not isinstance(limit, int) or len(sizes) == 1 or sum(sizes) <= limit:
        return [Turn(limit) for _ in sizes]
    if len(sizes) > limit:
        return _in_lanes(sizes, limit)
    shares = [1] * len(sizes)
    for _ in range(limit - len(sizes)):
        slowest = max(range(len(sizes)), key=lambda index: sizes[index] / shares[index])
        shares[slowest] += 1
    return [Turn(share) for share in shares]


def _in_lanes(sizes: Sequence[int], lanes: int) -> list[Turn]:
    """Returns turns in which each array runs one job at a time, after another array if no lane is free."""
    turns: list[Turn] = []
    jobs = [0] * lanes
    newest: list[int | None] = [None] * lanes
    for index, size in enumerate(sizes):
        lane = min(range(lanes), key=jobs.__getitem__)
        turns.append(Turn(1, newest[lane]))
        jobs[lane] += size
        newest[lane] = index
    return turns
