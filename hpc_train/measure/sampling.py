"""Numbers from repeated measurements: medians with what they vary by, and ratios of pairs with a bootstrap interval."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Spread:
    """The median of measurements, and the values below which 5 % and 95 % of them lie."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        ordered = sorted(values)
        return cls(median(ordered), _quantile(ordered, 0.05), _quantile(ordered, 0.95))


def paired_ratio(first: Sequence[float], second: Sequence[float], resamples: int = 5000, seed: int = 0) -> Spread:
    """The median of ``first[i] / second[i]`` with its bootstrap 95 % interval as ``low`` and ``high``.

    Pairs were measured one after the other, so what slows the machine for seconds slows both and leaves their ratio.
    The interval is the percentile bootstrap (Efron 1979) over pairs.
    """
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    draw = random.Random(seed)
    medians = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(resamples))
    return Spread(median(ratios), _quantile(medians, 0.025), _quantile(medians, 0.975))


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between neighbours."""
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])
