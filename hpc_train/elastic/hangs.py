"""Hang detection: bounds learned from earlier steps, and evidence collected from the workers of a node.

On several nodes and on GPUs there are two bounds, because a network link or file system may stall for seconds and
recover. Beyond the first, the step is reported as slow with the stacks of all ranks; beyond the second, it is a hang
and
the attempt ends. The agent polls the heartbeats in its own interpreter, so it detects workers that hold their
interpreter
lock forever or were stopped by a signal. Collecting evidence needs no worker's main thread, and stacks not even the
lock.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpc_train.elastic.culprit import RankState, group_states
from hpc_train.elastic.worker_process import SHOW_STACKS
from hpc_train.elastic.workers import Worker, Workers
from hpc_train.fabric.nccl_settings import ib_retry_s
from hpc_train.run.agent_worker import Beat, Phase
from hpc_train.run.processes import process_state

LEAST_S = 3.0  # minimum bound of a step
COLD_S = 30.0  # minimum bound of a step before enough step times are known
UNSEEN_S = 300.0  # bound of an evaluation or checkpoint before the first one has ended
START_S = 1800.0  # imports, reading a large checkpoint, compilation in the first step; final uploads
FACTOR = 5.0  # bound / observed time: the 99th percentile of steps, the longest of other phases
KEPT = 256  # step times
FEWEST = 5  # step times required to learn a bound
PATIENCE_S = 30.0  # minimum bound of a hang on several nodes and on GPUs
SEEN_S = 0.5  # cap on the time counted between two polls: the agent itself stalled or waited for the CPU


@dataclass(frozen=True)
class Hang:
    """A detected hang. ``rank`` was silent for longest and is not necessarily at fault (``elastic/culprit.py``).

    ``only_slow``: the rank may recover. This is reported once per silence.
    """

    rank: int
    phase: Phase
    seconds: float
    bound: float
    only_slow: bool = False


def patience_s(nodes: int, gpus_per_node: int, values: Mapping[str, str]) -> float:
    """Returns the minimum bound of a hang: twice the time for which NCCL itself retries, 0 on one CPU node.

    Args:
        values: the variables that are set for the workers, by name.
    """
    if nodes == 1 and not gpus_per_node:
        return 0.0
    between_gpus = nodes > 1 and gpus_per_node > 0  # otherwise nothing uses InfiniBand
    return max(PATIENCE_S, 2 * ib_retry_s(values)) if between_gpus else PATIENCE_S


@dataclass
class HangWatch:
    """Polls the heartbeats of one node. What it learned is kept over attempts (``begin``).

    Args:
        timeout_s: bound of a step and minimum bound of other phases; None: learned; 0: detection is off.
        least_s: the minimum learned bound of a step.
        patience_s: the minimum bound of a hang; 0: a slow step counts as a hang at once.
    """

    timeout_s: float | None = None
    least_s: float = LEAST_S
    patience_s: float = 0.0
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT), init=False)
    _longest: dict[Phase, float] = field(default_factory=dict, init=False)
    _last: dict[int, Beat] = field(default_factory=dict, init=False)
    _silent: dict[int, float] = field(default_factory=dict, init=False)
    _looked: float | None = field(default=None, init=False)
    _is_slow: bool = field(default=False, init=False)  # the current silence was reported

    def begin(self) -> None:
        """Begins a new attempt: forgets the workers, keeps the step times."""
        self._last.clear()
        self._silent.clear()
        self._looked = None
        self._is_slow = False

    def look(self, beats: Mapping[int, Beat], now: float) -> Hang | None:
        """Checks the heartbeats and returns a new hang or slow step, or None.

        Args:
            beats: heartbeats of the live workers, by rank.
            now: time on the monotonic clock.
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
        # ranks may wait for one that evaluates or saves
        bound = max(self.bound(beat.phase) for beat in beats.values())
        usual = max(self._slow_bound(beat.phase) for beat in beats.values())
        rank = max(beats, key=lambda rank: self._silent[rank])
        phase, silent = beats[rank].phase, self._silent[rank]
        if silent > bound:
            return Hang(rank, phase, silent, bound)
        was_slow = self._is_slow
        self._is_slow = self.patience_s > 0 and silent > usual
        return Hang(rank, phase, silent, usual, only_slow=True) if self._is_slow and not was_slow else None

    def bound(self, phase: Phase) -> float:
        """Returns the seconds that ``phase`` may take without a heartbeat."""
        if self.timeout_s is None:
            return max(self._slow_bound(phase), self.patience_s)
        return self.timeout_s if phase is Phase.STEP else max(self._slow_bound(phase), self.timeout_s)

    def _slow_bound(self, phase: Phase) -> float:
        """Returns the seconds after which ``phase`` counts as slow."""
        if phase is Phase.STEP:
            return self._step_bound()
        longest = self._longest.get(phase)
        if phase in (Phase.EVALUATION, Phase.CHECKPOINT):
            return UNSEEN_S if longest is None else max(COLD_S, FACTOR * longest)
        return START_S

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


ANSWER_S = 5.0  # a worker polls for questions twice per second
SETTLED_S = 0.1  # stacks that have not grown for this long are complete


@dataclass(frozen=True)
class Evidence:
    """Evidence on one rank. ``collectives`` is the JSON of torch's flight recorder, None without an answer."""

    state: RankState
    pid: int
    stacks: str
    collectives: bytes | None

    def text(self) -> str:
        """Formats the evidence for people."""
        state = self.state
        words = (
            f"{state.phase} after step {state.step}, for {state.seconds:.1f} s, process state {state.process or '-'}"
        )
        return f"--- rank {state.rank} on {state.node}, pid {self.pid}: {words} ---\n{self.stacks.rstrip()}\n"


@dataclass(frozen=True)
class _Question:
    worker: Worker
    number: int
    beat: Beat  # read before the signal, which interrupts some system calls
    silent: float

    @property
    def answered(self) -> bool:
        return self.worker.block.answer_to(self.number) is not None and bool(self.worker.block.stacks())


def collect(workers: Workers, node: str, limit_s: float = ANSWER_S) -> list[Evidence]:
    """Collects evidence on all live workers in the order of rank; takes ``limit_s`` if one does not answer."""
    questions = [_ask(worker) for worker in sorted(workers.alive, key=lambda worker: worker.rank)]
    _wait(workers, questions, time.monotonic() + limit_s)
    return [_evidence(question, node) for question in questions if not question.worker.gone]


def _ask(worker: Worker) -> _Question:
    beat = worker.block.beat()
    question = _Question(worker, worker.block.ask(), beat, time.monotonic() - beat.since)
    worker.block.clear_stacks()
    if worker.ready:  # before that it has no handler, and the signal would kill it
        worker.signal(SHOW_STACKS)
    return question


def _wait(workers: Workers, questions: Sequence[_Question], until: float) -> None:
    sizes: list[int] = []
    while time.monotonic() < until:
        workers.wait(SETTLED_S)  # also drains their pipes
        waited = [one for one in questions if not one.worker.gone and process_state(one.worker.pid) != "T"]
        before, sizes = sizes, [len(one.worker.block.stacks()) for one in waited]
        if sizes == before and all(one.answered for one in waited):
            return


def _evidence(question: _Question, node: str) -> Evidence:
    worker, beat = question.worker, question.beat
    answer, pid = worker.block.answer_to(question.number), worker.pid
    state = RankState(
        rank=worker.rank,
        node=node,
        step=beat.step,
        phase=beat.phase.name.lower(),
        seconds=round(question.silent, 3),
        arrived_step=beat.arrived_step,
        process=process_state(pid),
        answered=answer is not None,
        groups=group_states(answer or b"", saves=beat.phase is Phase.CHECKPOINT),
    )
    return Evidence(state, pid, worker.block.stacks() or "(no stacks)", answer)
