"""Confirms what was seen several times in a row, so that a single slow moment is not reported."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

# A straggler is a rank that the others wait for. Both searches for it, in one node and across nodes, use these.
LEAST_SHARE = 0.2  # smallest share of the time for which the others wait
LEAST_BLAME = 0.75  # smallest share of the waiting that one rank alone causes: on a busy machine every rank is late


@dataclass
class Streak(Generic[T]):
    """Confirms each finding once, when it is the same ``length`` times in a row."""

    length: int
    confirmed: set[T] = field(default_factory=set, init=False)
    _last: T | None = field(default=None, init=False)
    _count: int = field(default=0, init=False)

    def confirms(self, finding: T | None) -> bool:
        """Returns whether ``finding``, the newest, is confirmed now for the first time; None interrupts the streak."""
        self._count = self._count + 1 if finding == self._last else 1
        self._last = finding
        if finding is None or self._count < self.length or finding in self.confirmed:
            return False
        self.confirmed.add(finding)
        return True
