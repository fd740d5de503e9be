"""Which checkpoints may be removed: not the newest ones, not every Mth, not the best. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Kept:
    """What counts of a checkpoint that is there and whole."""

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Retention:
    """What is kept; a checkpoint stays when any of the three wants it."""

    newest: int = 2  # at least one in any case
    every: int = 0  # the first checkpoint of each span of so many steps from this step on; 0: none
    best: str | None = None  # the best by this metric; the lowest, of an accuracy the highest


def removable(checkpoints: Sequence[Kept], retention: Retention) -> set[int]:
    """Steps of the checkpoints that nothing wants to keep."""
    steps = sorted(found.step for found in checkpoints)
    kept = set(steps[-max(1, retention.newest) :])
    if retention.every > 0:
        first: dict[int, int] = {}
        for step in steps:
            first.setdefault(step // retention.every, step)
        kept.update(step for span, step in first.items() if span > 0)
    best = _best(checkpoints, retention.best)
    if best is not None:
        kept.add(best)
    return set(steps) - kept


def _best(checkpoints: Sequence[Kept], metric: str | None) -> int | None:
    if metric is None:
        return None
    sign = -1.0 if "accuracy" in metric else 1.0
    found = [
        (sign * found.metrics[metric], -found.step)
        for found in checkpoints
        if metric in found.metrics and math.isfinite(found.metrics[metric])
    ]
    return -min(found)[1] if found else None
