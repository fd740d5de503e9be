"""Windows of the data that a run passes over, because it diverged on them.

With them the batch of a step is still a function of (seed, step): they are in the checkpoint, so every resume takes the
same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Skipped:
    """``windows``: [first, last) positions in the sequence of global batches, in order, without overlap."""

    windows: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, value: Iterable[Sequence[int]]) -> Skipped:
        """From what JSON makes of ``windows``."""
        return cls(tuple((first, last) for first, last in value))

    def position(self, step: int) -> int:
        """The position of the batch that optimizer step ``step`` takes."""
        for first, last in self.windows:
            if step >= first:
                step += last - first
        return step

    def without(self, steps: range) -> Skipped:
        """Passes over the batches of ``steps`` as well: the first of them takes what the one after them took."""
        first, last = self.position(steps.start), self.position(steps.stop - 1) + 1
        others = [window for window in self.windows if window[1] <= first or last <= window[0]]
        return Skipped(tuple(sorted([*others, (first, last)])))
