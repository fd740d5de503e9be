"""Collects evidence on silent workers: what each of them does, which rank the others wait for, and whether this proves
a hang.

The agent collects evidence without a worker's main thread, and stacks even without its interpreter lock, so it also
examines workers that hold their interpreter lock forever or were stopped by a signal. The states of several nodes are
combined to find the rank that all others wait for.

A slow rank may recover, so most evidence only names a rank. Three findings prove a hang, because the workers cannot
continue by themselves (``proof``); ``hang_bounds`` says when workers are examined.

torch has a flight recorder for NCCL and another one for gloo. Newer versions list the entries of NCCL in both dumps, so
each entry is read once. The backends count separately, and torch may give groups of different ranks the same name. The
name of a group is therefore made of its backend, the name that torch gave it and, where recorded, its ranks. It is the
same on all ranks of the group.

With gloo, the host enters a collective when its data is there, so the time at which an entry was created says when the
rank arrived. With NCCL that is the time at which the host put the collective in a queue, which says nothing about the
GPU. The GPU's own start and duration are only recorded with TORCH_NCCL_ENABLE_TIMING=1.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hpc_train.elastic.decision import WorkerFailure
from hpc_train.elastic.worker_process import SHOW_STACKS
from hpc_train.elastic.workers import Worker, Workers
from hpc_train.run.agent_worker import Beat, Phase
from hpc_train.run.processes import cpu_seconds, is_reading_or_writing, process_state, stopped_child

GLOO = "gloo"


@dataclass(frozen=True)
class Collective:
    """One operation of a rank in a process group.

    Attributes:
        group: a name that is the same on all ranks of the group, and different for all other groups.
        description: torch's description of the group, e.g. ``mesh_dp``.
        number: the number of the collective in its group; a message between two ranks has the number of the collective
            before it.
        operation: its kind, e.g. ``all_reduce``.
        shapes: the shapes of its inputs.
        created_s: when the host called it, in seconds since the epoch.
        completed_s: when torch noticed that the device had completed it; None with gloo or before.
        duration_s: how long the device took, which includes waiting for the other ranks; None if it was not measured.
        has_started: whether the device has begun, where this is recorded, i.e. in groups with durations.
    """

    group: str
    description: str
    number: int
    operation: str
    shapes: str
    is_message: bool
    is_finished: bool
    created_s: float
    completed_s: float | None = None
    duration_s: float | None = None
    has_started: bool = False

    @property
    def is_on_host(self) -> bool:
        """Returns whether the host performs it, so that ``created_s`` is the time at which the rank arrived."""
        return not is_queued(self.group)


def is_queued(group: str) -> bool:
    """Returns whether the collectives of a group are queued for a device, which begins them later."""
    return not group.startswith(f"{GLOO} ")


def read_collectives(dumps: bytes) -> list[Collective]:
    """Parses a JSON object with the dump of each recorder (``train/processes.py``)."""
    seen: set[tuple[Any, ...]] = set()
    found: list[Collective] = []
    for dump in json.loads(dumps or b"{}").values():
        for entry in dump.get("entries", ()):
            key = (*entry["process_group"], entry["profiling_name"], entry["record_id"], entry["time_created_ns"])
            if key not in seen:
                seen.add(key)
                found.append(_collective(entry, dump.get("pg_config", {})))
    return found


def _collective(entry: Mapping[str, Any], groups: Mapping[str, Mapping[str, str]]) -> Collective:
    name, description = entry["process_group"]
    backend, _, operation = entry["profiling_name"].partition(":")
    ranks = groups.get(name, {}).get("ranks", "")
    milliseconds = entry.get("duration_ms")
    return Collective(
        group=f"{backend} {name} {ranks}".rstrip(),
        description=description,
        number=entry["collective_seq_id"],
        operation=operation,
        shapes=str(entry["input_sizes"]),
        is_message=entry["is_p2p"],
        # an entry is retired when torch's watchdog thread has seen its end
        is_finished=entry["retired"] or entry["state"] == "completed",
        created_s=entry["time_created_ns"] / 1e9,
        completed_s=(entry["time_discovered_completed_ns"] or 0) / 1e9 or None,
        duration_s=None if milliseconds is None else milliseconds / 1e3,
        has_started=bool(entry["time_discovered_started_ns"]) or entry["state"] == "completed",
    )


CONTROL = "control"  # group of ``train/step.py``, whose messages are posted without waiting
AGREEMENT = "all_reduce"  # the operation of these messages


@dataclass(frozen=True)
class GroupState:
    """Holds the state of one rank in one process group.

    Attributes:
        entered: number of collectives entered so far. With NCCL, a collective is entered when the host queues it.
        inside: whether the rank is inside one.
        operation: kind and input shapes of the last one.
        before: how often the records show that it entered the same operation before.
        reached: the last collective that its GPU has begun; None without NCCL or if starts are not recorded.
    """

    entered: int
    inside: bool
    operation: str = ""
    before: int = 0
    reached: int | None = None


@dataclass(frozen=True)
class RankState:
    """Holds the observed state of one rank at one moment.

    Attributes:
        seconds: time since its last sign of life.
        arrived_step: the step before which it last posted its message to the others.
        process: the kernel's state letter (R, S, D, T, …); empty for a process that is gone.
        answered: whether its interpreter answered the request for its collectives.
        groups: by name of the process group; the group of the control messages only during a save.
        waits: whether it is inside any operation with other ranks, except of the control messages of each step.
        cpu_s: processor time that it and its child processes have used since its start.
        storage: whether one of its threads waits for storage.
        stopped_child: the process id of one of its child processes, such as a loader, that a signal has stopped.
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
    waits: bool = False
    cpu_s: float = 0.0
    storage: bool = False
    stopped_child: int | None = None

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> RankState:
        """Parses the JSON of ``dataclasses.asdict``."""
        groups = {name: GroupState(**state) for name, state in value["groups"].items()}
        return cls(**{**value, "groups": groups})


def group_states(collectives: Sequence[Collective], saves: bool = False) -> dict[str, GroupState]:
    """Returns the state of a rank by name of the process group.

    Args:
        saves: the rank is in a save, whose collectives use the group of the control messages.
    """
    of_groups: dict[str, list[Collective]] = {}
    for collective in collectives:
        if (saves or collective.description != CONTROL) and not collective.is_message:
            of_groups.setdefault(collective.group, []).append(collective)
    return {name: _group_state(group) for name, group in of_groups.items()}


def _group_state(collectives: Sequence[Collective]) -> GroupState:
    last = max(collectives, key=lambda collective: collective.number)
    operations = [f"{collective.operation} {collective.shapes}" for collective in collectives]
    operation = f"{last.operation} {last.shapes}"
    inside = not all(collective.is_finished for collective in collectives)
    records_starts = any(collective.duration_s is not None for collective in collectives)
    reached = None
    if records_starts:
        reached = max((collective.number for collective in collectives if collective.has_started), default=None)
    return GroupState(last.number, inside, operation, operations.count(operation) - 1, reached)


def culprit(states: Sequence[RankState]) -> tuple[int | None, str]:
    """Returns the rank that the others wait for and the reason; None if no rank of ``states`` is behind the others."""
    first = min(((state.step, state.arrived_step) for state in states), default=None)
    for word, suspects in (
        ("is stopped by a signal", [state for state in states if state.process in ("T", "t")]),
        *(
            (f"waits for its child process {state.stopped_child} (a loader), which is stopped by a signal", [state])
            for state in states
            if state.stopped_child is not None
        ),
        (
            "does not respond in its interpreter, while others do",
            _minority(states, [s for s in states if not s.answered]),
        ),
        ("is behind the other ranks", _minority(states, [s for s in states if (s.step, s.arrived_step) == first])),
        ("did not enter the collective that the others are in", _not_in_collective(states)),
        ("entered a different collective than the others", _in_other_collective(states)),
        ("has a GPU that did not reach the collective that the others are in", _not_reached(states)),
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
            if hang.rank == rank and not hang.waits:
                return hang
            message = f"{hang.message.partition(';')[0]}; rank {rank} {reason}"
            text = f"{message}\n{hang.traceback}"
            return replace(hang, rank=rank, message=message, traceback=text, waits=False)
    return min(hangs, key=lambda hang: (hang.waits, hang.noticed))


def _minority(states: Sequence[RankState], suspects: list[RankState]) -> list[RankState]:
    if len(suspects) < len(states):
        return suspects
    return []


def _not_in_collective(states: Sequence[RankState]) -> list[RankState]:
    """Returns the ranks that are behind another in some group and inside no collective themselves, i.e. that do not
    wait.

    A host may queue several of NCCL's collectives, so one that has queued fewer is not behind while its GPU is in one.
    """
    furthest: dict[str, int] = {}
    for state in states:
        for name, group in state.groups.items():
            furthest[name] = max(furthest.get(name, 0), group.entered)

    def is_behind(name: str, group: GroupState) -> bool:
        return group.entered < furthest[name] and not (group.inside and is_queued(name))

    behind = [state for state in states if any(is_behind(*group) for group in state.groups.items())]
    return [state for state in behind if not any(group.inside for group in state.groups.values())] or behind


def _not_reached(states: Sequence[RankState]) -> list[RankState]:
    """Returns the ranks whose GPUs have begun fewer collectives of a group than the GPU of another rank."""
    furthest: dict[str, int] = {}
    for state in states:
        for name, group in state.groups.items():
            furthest[name] = max(furthest.get(name, 0), group.reached or 0)
    return [
        state
        for state in states
        if any(group.reached is not None and group.reached < furthest[name] for name, group in state.groups.items())
    ]


def _in_other_collective(states: Sequence[RankState]) -> list[RankState]:
    """Returns the rank whose operation differs from the operations of the others at the same point of a group; of
    several, the rank with the least common operation."""
    operations: dict[tuple[str, int], list[tuple[int, str, RankState]]] = {}
    for state in states:
        for name, group in state.groups.items():
            operations.setdefault((name, group.entered), []).append((group.before, group.operation, state))
    for entries in operations.values():
        if len({operation for _, operation, _ in entries}) > 1:
            return [min(entries, key=lambda entry: entry[0])[2]]
    return []


WINDOW_S = 10.0  # minimum time between two looks that prove a hang
IDLE_SHARE = 0.1  # a process that uses less of one processor is idle; torch's watchdog and gloo's threads use some


@dataclass(frozen=True)
class Proof:
    """Names a rank that cannot continue by itself and without which the others cannot continue."""

    rank: int
    reason: str


def proof(now: Sequence[RankState], before: Sequence[RankState], messages: bool) -> Proof | None:
    """Returns what proves that the ranks of a node will not continue; None if they may.

    - A rank is stopped by a signal.
    - Two ranks are inside different operations at the same number of the same group, which can never match.
    - Two looks show a rank in a training step with its data there, outside of the collective that all other ranks are
      in, and idle in between: it used no processor, waited for no storage and for no other rank. A rank that computes
      (also one that waits for its GPU, which keeps a processor busy, or for a compiler), reads data, evaluates or saves
      is not proof.

    Args:
        now: the states of the ranks of a node.
        before: their states at the first look; empty if there was none.
        messages: whether ranks send each other messages (a pipeline), which gloo does not record: a rank that waits
            for one looks idle, so that the third finding proves nothing.
    """
    for state in now:
        if state.process == "T":
            return Proof(state.rank, "is stopped by a signal")
    # the shapes may differ between the ranks of one operation
    inside = [
        replace(
            state,
            groups={
                name: replace(group, operation=group.operation.partition(" ")[0])
                for name, group in state.groups.items()
                if group.inside
            },
        )
        for state in now
    ]
    for other in _in_other_collective(inside):
        return Proof(other.rank, "entered a different collective than the others")
    earlier = {state.rank: state for state in before}
    if messages or earlier.keys() != {state.rank for state in now} or any(state.phase != "step" for state in now):
        return None
    if any(state.groups != earlier[state.rank].groups for state in now):
        return None
    for state in now:
        others = [other.groups for other in now if other.rank != state.rank]
        is_awaited = bool(others) and any(  # in a collective of a group that it has not entered
            all(name in groups and groups[name].inside and groups[name].entered > group.entered for groups in others)
            for name, group in state.groups.items()
        )
        if is_awaited and _is_idle(earlier[state.rank], state):
            seconds = state.seconds - earlier[state.rank].seconds
            return Proof(
                state.rank, f"was idle for {seconds:.0f} s and did not enter the collective that the others are in"
            )
    return None


def _is_idle(before: RankState, now: RankState) -> bool:
    elapsed = now.seconds - before.seconds
    return (
        elapsed >= WINDOW_S
        and (before.step, before.arrived_step) == (now.step, now.arrived_step)
        and now.arrived_step >= now.step  # it has posted its message of this step, so its data was there
        and all(
            sample.process == "S" and sample.answered and not sample.storage and not sample.waits
            for sample in (before, now)
        )
        and now.cpu_s - before.cpu_s < IDLE_SHARE * elapsed
    )


ANSWER_S = 5.0  # a worker polls for requests twice per second
SETTLED_S = 0.1  # stacks that have not grown for this long are complete


@dataclass(frozen=True)
class Evidence:
    """Holds the evidence on one rank. ``collectives`` is the JSON of torch's flight recorders, or None."""

    state: RankState
    pid: int
    stacks: str
    collectives: bytes | None

    def text(self) -> str:
        """Formats the evidence for people."""
        state = self.state
        words = f"{state.phase} after step {state.step}, for {state.seconds:.1f} s"
        if state.phase == Phase.RUNNING.name.lower():
            words = f"last sign of life {state.seconds:.1f} s ago" if state.seconds >= 1 else "running"
        words += f", process state {state.process or '-'}"
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
    beat = worker.block.beat() or Beat(0, Phase.RUNNING, time.monotonic(), 0, 0.0)  # a script without a sign of life
    question = _Question(worker, worker.block.ask(), beat, time.monotonic() - beat.since)
    worker.block.clear_stacks()
    if worker.ready and not worker.is_script:  # before that it has no handler, and the signal would kill it
        worker.signal(SHOW_STACKS)
    return question


def _wait(workers: Workers, questions: Sequence[_Question], until: float) -> None:
    sizes: list[int] = []
    while time.monotonic() < until:
        workers.wait(SETTLED_S)  # also drains their pipes
        waited = [
            question for question in questions if not question.worker.gone and process_state(question.worker.pid) != "T"
        ]
        before = sizes
        sizes = [len(question.worker.block.stacks()) for question in waited]
        if sizes == before and all(question.answered for question in waited):
            return


def _evidence(question: _Question, node: str) -> Evidence:
    worker = question.worker
    beat = question.beat
    answer = worker.block.answer_to(question.number)
    pid = worker.pid
    collectives = read_collectives(answer or b"")
    state = RankState(
        rank=worker.rank,
        node=node,
        step=beat.step,
        phase=beat.phase.name.lower(),
        seconds=round(question.silent, 3),
        arrived_step=beat.arrived_step,
        process=process_state(pid),
        answered=answer is not None,
        groups=group_states(collectives, saves=beat.phase is Phase.CHECKPOINT),
        waits=any(
            not collective.is_finished and (collective.description != CONTROL or collective.operation != AGREEMENT)
            for collective in collectives
        ),
        cpu_s=cpu_seconds(pid),
        storage=is_reading_or_writing(pid),
        stopped_child=stopped_child(pid),
    )
    return Evidence(state, pid, worker.block.stacks() or "(no stacks)", answer)
