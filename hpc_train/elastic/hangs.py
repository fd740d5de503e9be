"""When a silent worker is taken for a hung one: the bound is learned from the steps before.

The agent looks at the heartbeats a few times per second. It shares no interpreter with the workers, so it sees a worker
that holds its interpreter's lock for ever, and one that was stopped by a signal.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from hpc_train.run.heartbeat import Beat, Phase

LEAST_S = 3.0  # a step
COLD_S = 30.0  # a step of which too few were seen
UNSEEN_S = 300.0  # an evaluation or a checkpoint before the first one has ended
START_S = 1800.0  # imports, reading a large checkpoint, compilation in the first step; the end with its uploads
FACTOR = 5.0  # times what was seen: the 99th percentile of steps, the longest of the others
KEPT = 256  # step times
FEWEST = 5  # step times to learn from
SEEN_S = 0.5  # a look that comes later counts as this much: the agent itself stood still, or had to wait for the CPU


@dataclass(frozen=True)
class Hang:
    """``rank`` is the one that was silent for longest, not the one at fault (``elastic/culprit.py``)."""

    rank: int
    phase: Phase
    seconds: float
    bound: float


@dataclass
class HangWatch:
    """Looks at the heartbeats of one node. What it learned holds over attempts (``begin``).

    Args:
        timeout_s: of a step, and at least that of everything else; None: learned; 0: nothing is a hang.
        least_s: the smallest bound of a step that is learned.
    """

    timeout_s: float | None = None
    least_s: float = LEAST_S
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT), init=False)
    _longest: dict[Phase, float] = field(default_factory=dict, init=False)
    _last: dict[int, Beat] = field(default_factory=dict, init=False)
    _silent: dict[int, float] = field(default_factory=dict, init=False)
    _looked: float | None = field(default=None, init=False)

    def begin(self) -> None:
        """A new attempt: other workers, the same steps."""
        self._last.clear()
        self._silent.clear()
        self._looked = None

    def look(self, beats: Mapping[int, Beat], now: float) -> Hang | None:
        """
        Args:
            beats: of the workers that are alive, by rank.
            now: on the monotonic clock.
        """
        passed = 0.0 if self._looked is None else min(now - self._looked, SEEN_S)
        self._looked = now
        for rank, beat in beats.items():
            before = self._last.get(rank)
            if before is not None and beat != before:
                self._learn(before, beat)
            self._silent[rank] = self._silent.get(rank, 0.0) + passed if beat == before else 0.0
            self._last[rank] = beat
        if not beats or self.timeout_s == 0:
            return None
        bound = max(self.bound(beat.phase) for beat in beats.values())  # ranks wait for one that evaluates or saves
        rank = max(beats, key=lambda rank: self._silent[rank])
        silent = self._silent[rank]
        return Hang(rank, beats[rank].phase, silent, bound) if silent > bound else None

    def bound(self, phase: Phase) -> float:
        """Seconds that ``phase`` may take without a sign of life."""
        if phase is Phase.STEP:
            return self._step_bound() if self.timeout_s is None else self.timeout_s
        longest = self._longest.get(phase)
        if phase in (Phase.EVALUATION, Phase.CHECKPOINT):
            learned = UNSEEN_S if longest is None else max(COLD_S, FACTOR * longest)
        else:
            learned = START_S
        return max(learned, self.timeout_s or 0.0)

    def _step_bound(self) -> float:
        if len(self._steps) < FEWEST:
            return max(COLD_S, self.least_s, FACTOR * self._longest.get(Phase.FIRST_STEP, 0.0))
        ordered = sorted(self._steps)
        return max(self.least_s, FACTOR * ordered[math.ceil(0.99 * len(ordered)) - 1])

    def _learn(self, before: Beat, beat: Beat) -> None:
        seconds = beat.since - before.since
        if before.phase is not Phase.STEP:
            self._longest[before.phase] = max(seconds, self._longest.get(before.phase, 0.0))
        elif beat.step > before.step:
            self._steps.append(seconds / (beat.step - before.step))
