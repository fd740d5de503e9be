"""Defines how long workers may be silent: learned bounds after which their state is examined, and after which they are
killed.

The time of a step is learned (``LEAST_S``, ``FACTOR``). A worker that is silent for longer is slow. Whether that ends
the attempt depends on what may recover by itself, the table ``PATIENCE_S``:

- On one node without GPUs nothing between the ranks may pause, and a restart takes about a second, so a slow step is a
hang at once.
- On GPUs, and on several nodes, a network link, a file system or an allocator may pause and recover, and a restart
  costs the steps since the last checkpoint on all GPUs. There, a slow step is examined and reported, and becomes a hang
  at the bound in the table. Two looks at the ranks may prove a hang before that (``hangs.proof``).

While a worker waits for a processor, only the processor time that it gets counts (``Starvation``): on a machine that is
too busy it is late and not hung.

A worker that is stopped by a signal is a hang everywhere, after ``STOPPED_S`` in any phase.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum

from hpc_train.machine.network.nccl_settings import ib_retry_s
from hpc_train.run.agent_worker import Beat, Phase
from hpc_train.run.processes import Activity
from hpc_train.run.requests import MOST_HOLD_S

LEAST_S = 3.0  # minimum bound of a step
COLD_S = 30.0  # minimum bound of a step before enough step times are known
UNSEEN_S = 300.0  # bound of an evaluation or checkpoint before the first one has ended
FIRST_SIGN_S = 60.0  # minimum bound of the first sign of life of ``run.command``, which may import for a while
START_S = 1800.0  # imports, reading a large checkpoint, compilation in the first step; final uploads
COMPILATION_S = 600.0  # of the first step, if the config sets a bound of a step
QUIET_S = 60.0  # a silence of this length is reported in any phase, and again each time it has doubled
STEPPING = (Phase.STEP, Phase.RUNNING)
FACTOR = 5.0  # bound / observed time: the 99th percentile of steps, the longest of other phases
RETAINED = 256  # step times
MIN_STEP_TIMES = 5  # with fewer no bound is learned from them
SEEN_S = 0.5  # cap on the time counted between two polls: the agent itself stalled or waited for the CPU

# Minimum bounds of a hang. 120 s is longer than a Lustre client waits before it sends a lost request again (100 s, its
# parameter timeout), than an NFS client does (60 s, timeo of nfs(5)), than the longest pause between two TCP
# retransmissions (120 s, TCP_RTO_MAX of Linux), and than an allocator takes to free and request all memory (seconds).
PATIENCE_S = {"one CPU node": 0.0, "one node with GPUs": 120.0, "several nodes": 120.0}
NCCL_RETRIES = 2  # on several nodes with GPUs, at least this many times the time for which NCCL itself retries

STOPPED_S = 3.0  # a worker that is stopped for longer was not stopped together with its agent, e.g. by Slurm
SECOND_LOOK_S = 30.0  # minimum silence before the second look, which may prove that a rank is not merely late


def patience_s(nodes: int, gpus_per_node: int, values: Mapping[str, str]) -> float:
    """Returns the minimum bound of a hang.

    Args:
        values: the variables that are set for the workers, by name.
    """
    if nodes == 1:
        return PATIENCE_S["one node with GPUs" if gpus_per_node else "one CPU node"]
    retries = NCCL_RETRIES * ib_retry_s(values) if gpus_per_node else 0.0  # otherwise nothing uses InfiniBand
    return max(PATIENCE_S["several nodes"], retries)


class Stage(Enum):
    """Lists the responses to a silence."""

    QUIET = "quiet"  # reported, whether the phase may take that long or not
    SLOW = "slow"  # the first look at the ranks
    STILL_SLOW = "still slow"  # the second look
    STOPPED = "stopped"  # a worker is stopped by a signal
    HANG = "hang"  # silent for longer than the bound


@dataclass(frozen=True)
class Silence:
    """A silence of the workers. ``rank`` was silent longest, but is not necessarily at fault (``hangs.culprit``)."""

    rank: int
    phase: Phase
    seconds: float
    bound: float
    stage: Stage


@dataclass
class Starvation:
    """Measures how much of the time the workers of a node had the processors that they were ready to use.

    A thread that is ready either runs or waits for a processor. While a worker has such a thread, its time counts in
    proportion to its processor time: fully for a worker that hangs in a loop, and not for one that the kernel does not
    schedule. Workers wait for each other, so the one that gets least decides.
    """

    _before: dict[int, float] = field(default_factory=dict, init=False)  # rank -> processor time
    _at: float = field(default=0.0, init=False)

    def share(self, workers: Mapping[int, Activity], now: float) -> float:
        """Returns the share of the time since the last call that counts; 1 for workers that it has not seen before.

        Args:
            workers: what each worker does, by rank; empty if it does not matter.
            now: time on the monotonic clock.
        """
        passed = now - self._at
        before = self._before
        self._at = now
        self._before = {rank: activity.cpu_s for rank, activity in workers.items()}
        got = [found.cpu_s - before[rank] for rank, found in workers.items() if found.ready and rank in before]
        if passed > 0:
            return min([1.0, *(used / passed for used in got)])
        return 1.0


@dataclass
class HangWatch:
    """Polls the heartbeats of one node. It keeps what it has learned over attempts (``begin``).

    Args:
        timeout_s: bound of a step and minimum bound of saves and evaluations; None learns the bounds, and 0 disables
        the detection. least_s: the minimum learned bound of a step. patience_s: the minimum bound of a hang; with 0, a
        slow step counts as a hang at once. start_s: the bound of the start, and of the first step unless ``timeout_s``
        bounds it. compiles: whether the first step compiles.
    """

    timeout_s: float | None = None
    least_s: float = LEAST_S
    patience_s: float = 0.0
    start_s: float = START_S
    compiles: bool = False
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=RETAINED), init=False)
    _longest: dict[Phase, float] = field(default_factory=dict, init=False)
    _last: dict[int, Beat] = field(default_factory=dict, init=False)
    _silent: dict[int, float] = field(default_factory=dict, init=False)
    _stopped: dict[int, float] = field(default_factory=dict, init=False)
    _checked_at: float | None = field(default=None, init=False)
    _looks: int = field(default=0, init=False)  # at the current silence
    _reported_at: float = field(default=0.0, init=False)  # the length at which the current silence was reported last

    def begin(self) -> None:
        """Begins a new attempt: forgets the workers, keeps the step times."""
        self._last.clear()
        self._silent.clear()
        self._stopped.clear()
        self._checked_at = None
        self._looks = 0

    @property
    def doubtful(self) -> bool:
        """Returns whether a worker was silent for so long that it matters whether it waits for a processor."""
        silent = max((self._silent[rank] for rank in self._last), default=0.0)
        phases = {beat.phase for beat in self._last.values()}
        return bool(phases) and silent > min(min(self._slow_bound(phase), self.bound(phase)) for phase in phases) / 2

    def check(
        self, beats: Mapping[int, Beat], now: float, stopped: Collection[int] = (), share: float = 1.0
    ) -> Silence | None:
        """Checks the heartbeats; returns a silence in a stage that was not returned before, or None.

        Args:
            beats: heartbeats of the live workers, by rank.
            now: time on the monotonic clock.
            stopped: the ranks that are stopped by a signal.
            share: the share of the time since the last check that counts (``Starvation``).
        """
        passed = 0.0 if self._checked_at is None else share * min(now - self._checked_at, SEEN_S)
        self._checked_at = now
        for rank, beat in beats.items():
            before = self._last.get(rank)
            if before is not None and beat != before:
                self._learn(before, beat)
            self._silent[rank] = self._silent.get(rank, 0.0) + passed if beat == before else 0.0
            self._stopped[rank] = self._stopped.get(rank, 0.0) + passed if rank in stopped else 0.0
            self._last[rank] = beat
        if not beats or self.timeout_s == 0:
            return None
        return self._stopped_rank(beats) or self._silent_rank(beats)

    def _stopped_rank(self, beats: Mapping[int, Beat]) -> Silence | None:
        rank = max(beats, key=lambda rank: self._stopped[rank])
        if self._stopped[rank] <= STOPPED_S:
            return None
        return Silence(rank, beats[rank].phase, self._silent[rank], STOPPED_S, Stage.STOPPED)

    def _silent_rank(self, beats: Mapping[int, Beat]) -> Silence | None:
        # ranks may wait for one that evaluates or saves
        bound = max(self.bound(beat.phase) for beat in beats.values())
        usual = max(self._slow_bound(beat.phase) for beat in beats.values())
        rank = max(beats, key=lambda rank: self._silent[rank])
        phase = beats[rank].phase
        silent = self._silent[rank]
        if silent > bound:
            return Silence(rank, phase, silent, bound, Stage.HANG)
        if phase is Phase.HELD:
            return None
        before = self._looks
        self._looks = self._looks_due(silent, usual)
        if self._looks > before:
            return Silence(rank, phase, silent, usual, Stage.SLOW if before == 0 else Stage.STILL_SLOW)
        if silent < QUIET_S:
            self._reported_at = 0.0
        elif silent >= max(QUIET_S, 2 * self._reported_at):
            self._reported_at = silent
            return Silence(rank, phase, silent, bound, Stage.QUIET)
        return None

    def _looks_due(self, silent: float, usual: float) -> int:
        if self.patience_s == 0 or silent <= usual:
            return 0
        second = self.timeout_s is None and silent > max(SECOND_LOOK_S, 2 * usual)
        if second and self._looks > 0:
            return 2
        return 1

    def bound(self, phase: Phase) -> float:
        """Returns the seconds that ``phase`` may take without a heartbeat."""
        if self.timeout_s is None or phase is Phase.HELD:
            return max(self._slow_bound(phase), self.patience_s)
        if phase in STEPPING:
            return self.timeout_s
        if phase is Phase.FIRST_STEP:
            if self.compiles:
                return max(self.timeout_s, COMPILATION_S)
            return self.timeout_s
        if phase is Phase.STARTING:
            return self.start_s
        return max(self._slow_bound(phase), self.timeout_s)

    def _slow_bound(self, phase: Phase) -> float:
        """Returns the seconds after which ``phase`` counts as slow."""
        if phase in STEPPING:
            return self._step_bound()
        longest = self._longest.get(phase)
        if phase in (Phase.EVALUATION, Phase.CHECKPOINT):
            if longest is None:
                return UNSEEN_S
            return max(COLD_S, FACTOR * longest)
        if phase is Phase.STOPPING:
            return START_S
        if phase is Phase.HELD:
            return MOST_HOLD_S + QUIET_S
        return self.start_s

    def _step_bound(self) -> float:
        if len(self._steps) < MIN_STEP_TIMES:
            return max(COLD_S, self.least_s, FACTOR * self._longest.get(Phase.FIRST_STEP, 0.0))
        ordered = sorted(self._steps)
        return max(self.least_s, FACTOR * ordered[math.ceil(0.99 * len(ordered)) - 1])

    def _learn(self, before: Beat, beat: Beat) -> None:
        seconds = beat.since - before.since
        if before.phase not in STEPPING:
            self._longest[before.phase] = max(seconds, self._longest.get(before.phase, 0.0))
        elif beat.step > before.step:
            self._steps.append(seconds / (beat.step - before.step))
