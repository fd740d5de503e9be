"""Hang detection: learned bounds for silent workers, evidence from the workers of a node, and the rank at fault.

On several nodes and on GPUs there are two bounds, because a network link or file system may stall for seconds and
recover. Beyond the first, the step is reported as slow with the stacks of all ranks; beyond the second, it is a hang
and the attempt ends. The agent polls the heartbeats in its own interpreter, so it detects workers that hold their
interpreter lock forever or were stopped by a signal. Collecting evidence needs no worker's main thread, and stacks do
not even need the lock. The states of several nodes are combined to find the rank that all others wait for.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hpc_train.elastic.decision import WorkerFailure
from hpc_train.elastic.worker_process import SHOW_STACKS
from hpc_train.elastic.workers import Worker, Workers
from hpc_train.fabric.nccl_settings import ib_retry_s
from hpc_train.run.agent_worker import Beat, Phase
from hpc_train.run.processes import process_state

CONTROL = "control"  # group of ``train/step.py``, whose messages are posted without waiting


@dataclass(frozen=True)
class GroupState:
    """The state of one rank in one process group.

    Attributes:
        entered: number of collectives entered so far.
        inside: whether the rank is inside one.
        operation: kind and input shapes of the last one.
        before: how often it entered the same operation before, as far back as recorded.
    """

    entered: int
    inside: bool
    operation: str = ""
    before: int = 0


@dataclass(frozen=True)
class RankState:
    """The observed state of one rank at one moment.

    Attributes:
        seconds: time since its last sign of life.
        arrived_step: the step before which it last posted its message to the others.
        process: the kernel's state letter (R, S, D, T, …); empty for a process that is gone.
        answered: whether its interpreter answered the question for its collectives.
        groups: by name of the process group; the group of the control messages only during a save.
    """

    rank: int
    node: str
    step: int
    phase: str
    seconds: float
    arrived_step: int
    process: str
    answered: bool
    groups: Mapping[str, GroupState] = field(default_factory=dict)

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> RankState:
        """Parses the JSON of ``dataclasses.asdict``."""
        groups = {name: GroupState(**state) for name, state in value["groups"].items()}
        return cls(**{**value, "groups": groups})


def group_states(dump: bytes, saves: bool = False) -> dict[str, GroupState]:
    """Parses the JSON of torch's flight recorder (version 2.x).

    Args:
        saves: the rank is in a save, whose collectives use the group of the control messages.
    """
    collectives: dict[str, list[dict[str, Any]]] = {}
    for entry in json.loads(dump or b"{}").get("entries", []):
        name, description = entry["process_group"]
        if (saves or description != CONTROL) and not entry["is_p2p"]:
            collectives.setdefault(name, []).append(entry)
    return {name: _group_state(entries) for name, entries in collectives.items()}


def _group_state(entries: Sequence[Mapping[str, Any]]) -> GroupState:
    last = max(entries, key=lambda entry: entry["collective_seq_id"])
    operations = [f"{entry['profiling_name']} {entry['input_sizes']}" for entry in entries]
    own = f"{last['profiling_name']} {last['input_sizes']}"
    inside = not all(entry["retired"] for entry in entries)
    return GroupState(last["collective_seq_id"], inside, own, operations.count(own) - 1)


def culprit(states: Sequence[RankState]) -> tuple[int | None, str]:
    """Returns the rank that the others wait for and the reason; None if no rank of ``states`` is behind the others."""
    for word, suspects in (
        ("is stopped by a signal", [state for state in states if state.process in ("T", "t")]),
        (
            "does not respond in its interpreter, while others do",
            _minority(states, [s for s in states if not s.answered]),
        ),
        ("is behind the other ranks", _minority(states, _behind(states))),
        ("did not enter the collective that the others are in", _not_in_collective(states)),
        ("entered a different collective than the others", _in_other_collective(states)),
        ("waits for storage", _minority(states, [state for state in states if state.process == "D"])),
    ):
        if suspects:
            return min(suspects, key=lambda state: state.rank).rank, word
    return None, "no rank is behind the others"


def find_culprit(hangs: Sequence[WorkerFailure]) -> WorkerFailure:
    """Combines the reports of a hang from several nodes; returns the failure of the rank that all wait for."""
    states = [RankState.parse(state) for hang in hangs for state in hang.states]
    rank, reason = culprit(states)
    for hang in hangs:
        if rank is not None and rank in (state["rank"] for state in hang.states):
            return hang if hang.rank == rank and not hang.waits else _named(hang, rank, reason)
    return min(hangs, key=lambda hang: (hang.waits, hang.noticed))


def _named(hang: WorkerFailure, rank: int, reason: str) -> WorkerFailure:
    message = f"{hang.message.partition(';')[0]}; rank {rank} {reason}"
    return replace(hang, rank=rank, message=message, traceback=f"{message}\n{hang.traceback}", waits=False)


def _minority(states: Sequence[RankState], found: list[RankState]) -> list[RankState]:
    return found if len(found) < len(states) else []


def _behind(states: Sequence[RankState]) -> list[RankState]:
    first = min((state.step, state.arrived_step) for state in states)
    return [state for state in states if (state.step, state.arrived_step) == first]


def _not_in_collective(states: Sequence[RankState]) -> list[RankState]:
    """Returns the ranks that are behind another in some group and inside no collective themselves, i.e. not waiting."""
    furthest: dict[str, int] = {}
    for state in states:
        for name, group in state.groups.items():
            furthest[name] = max(furthest.get(name, 0), group.entered)
    behind = [s for s in states if any(group.entered < furthest[name] for name, group in s.groups.items())]
    return [state for state in behind if not any(group.inside for group in state.groups.values())] or behind


def _in_other_collective(states: Sequence[RankState]) -> list[RankState]:
    """Returns the rank whose operation differs from the others' at the same point of a group, the least usual one."""
    operations: dict[tuple[str, int], list[tuple[int, str, RankState]]] = {}
    for state in states:
        for name, group in state.groups.items():
            operations.setdefault((name, group.entered), []).append((group.before, group.operation, state))
    for found in operations.values():
        if len({operation for _, operation, _ in found}) > 1:
            return [min(found, key=lambda one: one[0])[2]]
    return []


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
    """A detected hang. ``rank`` was silent for longest and is not necessarily at fault (see ``culprit``).

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
    _checked_at: float | None = field(default=None, init=False)
    _is_slow: bool = field(default=False, init=False)  # the current silence was reported

    def begin(self) -> None:
        """Begins a new attempt: forgets the workers, keeps the step times."""
        self._last.clear()
        self._silent.clear()
        self._checked_at = None
        self._is_slow = False

    def check(self, beats: Mapping[int, Beat], now: float) -> Hang | None:
        """Checks the heartbeats and returns a new hang or slow step, or None.

        Args:
            beats: heartbeats of the live workers, by rank.
            now: time on the monotonic clock.
        """
        passed = 0.0 if self._checked_at is None else min(now - self._checked_at, SEEN_S)
        self._checked_at = now
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


ANSWER_S = 5.0  # a worker polls for requests twice per second
SETTLED_S = 0.1  # stacks that have not grown for this long are complete


@dataclass(frozen=True)
class Evidence:
    """Evidence on one rank. ``collectives`` is the JSON of torch's flight recorder; None without an answer."""

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
