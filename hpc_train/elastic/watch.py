"""The agent watches the workers of its node: it reports hangs, slow steps and stragglers, and answers stack requests.

A straggler is a rank that the others wait for, step after step. It is found from the times at which ranks enter the
same collective, which torch's flight recorder keeps. The ranks of a group leave a collective together, so the arrival
of each rank at the next one shows how long its own work took. On a GPU the rank arrives when its device begins the
collective; the time at which the host queued it has no meaning. Stages of a pipeline do different work, so only ranks
with the same work (data and tensor parallel) are compared. No rank is killed because it is late.
"""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from hpc_train.config.schema import Config
from hpc_train.config.values import parse_hang_timeout, runs_command
from hpc_train.elastic.decision import WorkerFailure
from hpc_train.elastic.hang_bounds import (
    COLD_S,
    FIRST_SIGN_S,
    LEAST_S,
    START_S,
    UNSEEN_S,
    HangWatch,
    Silence,
    Stage,
    Starvation,
)
from hpc_train.elastic.hangs import Collective, Evidence, Proof, RankState, collect, culprit, proof, read_collectives
from hpc_train.elastic.workers import Worker, Workers
from hpc_train.layout.layout import Layout
from hpc_train.run.agent_worker import SharedBlock
from hpc_train.run.directory import RunDirectory, rank_writer
from hpc_train.run.event_log import EventLog
from hpc_train.run.exits import Failure
from hpc_train.run.processes import activity, process_state
from hpc_train.run.requests import HoldRequest, answer_stacks_request
from hpc_train.telemetry.tracebacks import stack_place
from hpc_train.train.watch.stragglers import LEAST_BLAME, LEAST_SHARE, Streak
from hpc_train.units import format_duration

# the pause between two queries, which doubles: each query costs a worker some ten milliseconds
FIRST_S, MOST_S = 5.0, 60.0
MIN_COLLECTIVES = 20  # with fewer nobody is said to be late
IN_A_ROW = 2  # windows that must agree
SAME_WORK = ("mesh_dp", "mesh_cp", "mesh_tp")  # prefixes of the descriptions of such groups
WORLD = "default_pg"  # replaces a group that contains all ranks
ROOTED = ("broadcast", "reduce", "gather", "scatter")  # ranks may leave these at different times

Arrivals = Mapping[tuple[str, int], Mapping[int, float]]  # collective (group, number) → rank → seconds


@dataclass(frozen=True)
class Straggler:
    """Describes the rank that others wait for: ``share`` of the time, and ``late_s``, its median lateness at a
    collective."""

    rank: int
    share: float
    late_s: float

    def details(self) -> dict[str, Any]:
        message = f"the other ranks wait for rank {self.rank} {self.share:.0%} of the time"
        return {"share": round(self.share, 3), "late_s": round(self.late_s, 4), "message": message}


@dataclass
class StragglerWatch:
    """Asks the workers of a node for their collectives now and then, and compares the answers."""

    _pause: float = field(default=FIRST_S, init=False)
    _pipeline: bool = field(default=False, init=False)
    _next: float | None = field(default=None, init=False)
    _questions: dict[int, int] = field(default_factory=dict, init=False)
    _since: float = field(default=0.0, init=False)  # earlier collectives were already compared
    _ranks: Streak[int] = field(default_factory=lambda: Streak(IN_A_ROW), init=False)

    def begin(self, pipeline: bool) -> None:
        """Begins a new attempt, with or without pipeline stages."""
        self._pipeline = pipeline
        self._next = None
        self._pause = FIRST_S
        self._since = 0.0
        self._ranks = Streak(IN_A_ROW)
        self._questions.clear()

    def check(self, workers: Sequence[Worker], now: float) -> list[Straggler]:
        """Returns a new straggler that ``IN_A_ROW`` windows in a row agree on, if there is one."""
        if self._next is None:
            self._next = now + self._pause
        if self._questions:
            return self._read(workers)
        if now >= self._next and len(workers) > 1:
            self._pause = min(2 * self._pause, MOST_S)
            self._next = now + self._pause
            self._questions = {worker.rank: worker.block.ask() for worker in workers}
        return []

    def _read(self, workers: Sequence[Worker]) -> list[Straggler]:
        answers = {worker.rank: worker.block.answer_to(self._questions.get(worker.rank, 0)) for worker in workers}
        dumps = {rank: answer for rank, answer in answers.items() if answer is not None}
        if len(dumps) < len(answers):
            return []
        self._questions.clear()
        arrivals = arrivals_of(dumps, self._since, self._pipeline)
        self._since = max((max(times.values()) for times in arrivals.values()), default=self._since)
        straggler = find_straggler(arrivals)
        confirmed = self._ranks.confirms(None if straggler is None else straggler.rank)
        if confirmed and straggler is not None:
            return [straggler]
        return []


def arrivals_of(dumps: Mapping[int, bytes], since: float = 0.0, pipeline: bool = True) -> Arrivals:
    """Returns the collectives after ``since`` that several of these ranks have entered.

    Where any rank uses its GPU to communicate, only its collectives count, as those of the host are rare and late.
    """
    compared = SAME_WORK if pipeline else (*SAME_WORK, WORLD)
    of_ranks = {rank: read_collectives(dump) for rank, dump in dumps.items()}
    on_host = all(collective.is_on_host for collectives in of_ranks.values() for collective in collectives)
    entered: dict[tuple[str, int], dict[int, Collective]] = {}
    for rank, collectives in of_ranks.items():
        for collective in collectives:
            if (
                collective.description.startswith(compared)
                and not collective.is_message
                and collective.is_on_host == on_host
            ):
                entered.setdefault((collective.group, collective.number), {})[rank] = collective
    arrivals = {
        key: {rank: c.created_s for rank, c in ranks.items()} if on_host else on_device(ranks)
        for key, ranks in entered.items()
    }
    return {key: times for key, times in arrivals.items() if len(times) > 1 and min(times.values()) > since}


def on_device(ranks: Mapping[int, Collective]) -> dict[int, float]:
    """Returns when the GPU of each rank began a collective, from its duration there: all GPUs leave it together.

    The time at which it ended only has to be roughly right, since all ranks use the same one. Without measured
    durations, and for operations whose ranks may leave at different times, there are no arrivals.
    """
    ends = [collective.completed_s for collective in ranks.values() if collective.completed_s is not None]
    took = {rank: collective.duration_s for rank, collective in ranks.items() if collective.operation not in ROOTED}
    if len(ends) < len(ranks):
        return {}
    return {rank: min(ends) - duration for rank, duration in took.items() if duration is not None}


def find_straggler(arrivals: Arrivals) -> Straggler | None:
    """Returns the rank that the others wait for in most collectives and for much of the time, if there is one."""
    if len(arrivals) < MIN_COLLECTIVES:
        return None
    waits: dict[int, list[float]] = {}
    for times in arrivals.values():
        last = max(times, key=lambda rank: times[rank])
        others = [time for rank, time in times.items() if rank != last]
        waits.setdefault(last, []).append(times[last] - median(others))
    moments = [time for times in arrivals.values() for time in times.values()]
    rank = max(waits, key=lambda rank: sum(waits[rank]))
    late = sum(waits[rank])
    all_late = sum(sum(rank_waits) for rank_waits in waits.values())
    share = late / max(max(moments) - min(moments), 1e-9)
    if share < LEAST_SHARE or late < LEAST_BLAME * all_late:
        return None
    return Straggler(rank, share, median(waits[rank]))


@dataclass(frozen=True)
class OtherNodes:
    """Reaches the agents of the other nodes of an attempt.

    Attributes:
        tell_saved: informs them that this node has saved the stacks of its ranks, so that they save those of theirs.
        have_saved: returns whether they have saved them, or nothing is gained by waiting.
    """

    tell_saved: Callable[[], None]
    have_saved: Callable[[], bool]


TIMED_OUT = re.compile(r"Timed out waiting|before timing out")
# Slow steps reported per interval: all nodes write their stacks, possibly to the file system that is slow.
SLOW_STEPS, SLOW_EVERY_S = 3, 600.0
# The ranks of other nodes that wait for a rank lose their connections and end when it is killed. So before a rank that
# hangs is killed, the other nodes have OTHERS_S to save the stacks of theirs, which may take SAVE_S to answer.
OTHERS_S, SAVE_S, SAVE_TICK_S = 3.0, 2.0, 0.1


@dataclass
class Watch:
    """Watches the workers of one node over all attempts."""

    run: RunDirectory
    node: str
    hangs: HangWatch
    stragglers: StragglerWatch = field(default_factory=StragglerWatch)
    stacks_requested: int = 0  # number of the newest request for stacks
    hold_requested: HoldRequest | None = None  # the newest request to hold a rank
    lost_replicas: frozenset[int] = frozenset()  # without which the attempt goes on (``strategy.local_steps``)
    of_command: bool = False  # ``run.command``, whose phases and steps are not known
    _events: EventLog | None = field(default=None, init=False)
    _slow_reported_at: deque[float] = field(default_factory=lambda: deque(maxlen=SLOW_STEPS), init=False)
    _answered: int = field(default=0, init=False)
    _passed_on: HoldRequest | None = field(default=None, init=False)
    _workers: Workers | None = field(default=None, init=False)
    _pipeline: bool = field(default=False, init=False)
    _starvation: Starvation = field(default_factory=Starvation, init=False)
    _first_look: Sequence[RankState] = field(default=(), init=False)  # at the current silence
    _timeout_reported: bool = field(default=False, init=False)  # in the current attempt
    _hang_saved: bool = field(default=False, init=False)  # likewise: the stacks of a hang, here or on another node
    _others: OtherNodes | None = field(default=None, init=False)

    @classmethod
    def of(cls, run: RunDirectory, node: str, config: Config) -> Watch:
        timeout = parse_hang_timeout(config.elastic.hang_timeout_s)
        least = COLD_S if config.train.compile else LEAST_S  # a change of shapes recompiles in the middle of training
        if config.run.entry is not None:
            least = UNSEEN_S  # a step of a custom loop may contain anything
        if runs_command(config):
            least = START_S  # a script does not report what it does: it may evaluate, save or compile
        start_s = config.elastic.start_timeout_s
        of_command = config.run.command is not None
        if of_command and timeout:
            start_s = max(timeout, FIRST_SIGN_S)
        hangs = HangWatch(timeout, least, start_s=start_s, compiles=config.train.compile)
        return cls(run, node, hangs, of_command=of_command)

    def begin(self, events: EventLog, layout: Layout, patience_s: float, others: OtherNodes | None = None) -> None:
        """Begins an attempt.

        Args:
            events: where its events go.
            patience_s: that of ``HangWatch``.
            others: the other nodes of the attempt; None on a single node.
        """
        self._events = events
        self.hangs.patience_s = patience_s
        self.hangs.begin()
        self._pipeline = layout.pp > 1
        self.stragglers.begin(self._pipeline)
        self._timeout_reported = self._hang_saved = False
        self._workers = None
        self._others = others
        self.lost_replicas = frozenset()

    def check(self, workers: Workers) -> None:
        """Checks the workers; adds a hang to the failures of ``workers``. Call it a few times per second."""
        now = time.monotonic()
        self._workers = workers
        if not workers.failures:
            beats = {worker.rank: beat for worker in workers.alive if (beat := worker.block.beat()) is not None}
            stopped = [worker.rank for worker in workers.alive if process_state(worker.pid) == "T"]
            running = {}
            if self.hangs.doubtful:
                running = {worker.rank: activity(worker.pid) for worker in workers.alive}
            silence = self.hangs.check(beats, now, stopped, self._starvation.share(running, now))
            if silence is not None and self._ends_attempt(silence, workers, now):
                return
            for straggler in self.stragglers.check(workers.alive, now):
                self._event("straggler", rank=straggler.rank, **straggler.details())
        elif not self._timeout_reported and workers.alive:
            for failure in workers.failures:  # of a collective by its timeout, in the words of gloo or NCCL
                if failure.failure is Failure.COMMUNICATION and TIMED_OUT.search(failure.message):
                    self._timeout_reported = True
                    self._report_timeout(failure, collect(workers, self.node))
                    break
        self._pass_on(workers)
        if self.stacks_requested != self._answered and workers.alive:
            self._answered = number = self.stacks_requested
            text = "\n".join(item.text() for item in collect(workers, self.node))
            path = self.run.logs / "stacks" / "answers"
            self._write(path, lambda: answer_stacks_request(self.run, number, self.node, text), len(text))

    def _pass_on(self, workers: Workers) -> None:
        """Passes a request to hold a rank, and the lost replicas, on to the workers."""
        hold = self.hold_requested
        for worker in workers.alive:
            if isinstance(worker.block, SharedBlock):
                if hold is not None and hold != self._passed_on and worker.rank == hold.rank:
                    worker.block.hold_requested = hold.time
                    self._passed_on = hold
                if self.lost_replicas:
                    worker.block.lost_replicas = self.lost_replicas
                    if worker.block.beat().arrived == 0 and not workers.failures:  # it has not begun to train
                        message = "another replica was lost before the first step"
                        workers.fail(WorkerFailure(worker.rank, Failure.COMMUNICATION, message, message, time.time()))

    def _ends_attempt(self, silence: Silence, workers: Workers, now: float) -> bool:
        """Examines silent workers; returns whether they hang or have ended."""
        evidence = collect(workers, self.node)
        states = [item.state for item in evidence]
        if silence.stage is Stage.SLOW:
            self._first_look = states
        if not evidence:  # they have ended and report the reason themselves
            return True
        if silence.stage is Stage.QUIET:
            self._report_quiet(silence, evidence)
            return False
        before = self._first_look if silence.stage is Stage.STILL_SLOW else ()
        proven = None if silence.stage is Stage.HANG else proof(states, before, self._pipeline)
        if silence.stage is Stage.HANG or proven is not None:
            failure = self._report_hang(silence, evidence, proven)
            self._wait_for_others(workers)
            workers.fail(failure)
            return True
        if silence.stage is Stage.SLOW:
            reported_at = self._slow_reported_at
            if len(reported_at) < SLOW_STEPS or now - reported_at[0] >= SLOW_EVERY_S:
                reported_at.append(now)
                self._report_slow_step(silence, evidence)
        return False

    def keep_stacks(self) -> None:
        """Saves the stacks of this node once for a hang that another node reported."""
        if self._hang_saved:
            return
        if self._workers is not None and not self._workers.failures:
            self._write_evidence("hang", collect(self._workers, self.node, SAVE_S))
        self._tell_saved()

    def _wait_for_others(self, workers: Workers) -> None:
        """Gives the other nodes time to save the stacks of their ranks before the ranks of this node are killed."""
        self._tell_saved()
        until = time.monotonic() + OTHERS_S
        while (
            self._others is not None
            and not self._others.have_saved()
            and workers.alive
            and not workers.failures
            and time.monotonic() < until
        ):
            workers.wait(SAVE_TICK_S)

    def _tell_saved(self) -> None:
        self._hang_saved = True
        if self._others is not None:
            self._others.tell_saved()

    def _report_quiet(self, quiet: Silence, evidences: Sequence[Evidence]) -> None:
        """Reports in the log and the events what a rank without progress is doing, whether this is unusual or not."""
        evidence = next((item for item in evidences if item.state.rank == quiet.rank), evidences[0])
        state = evidence.state
        place = stack_place(evidence.stacks)
        what = f"no step for {format_duration(quiet.seconds)}: {state.phase}"
        if self.of_command:
            what = f"no sign of life for {format_duration(quiet.seconds)}"
        message = f"{what}, rank {state.rank}"
        if place:
            message += f", {place}"
        print(f"{message}; it counts as a hang after {format_duration(quiet.bound)}", file=sys.stderr, flush=True)
        self._event("no_progress", step=state.step, rank=state.rank, phase=state.phase, message=message)

    def _report_slow_step(self, slow: Silence, evidences: Sequence[Evidence]) -> None:
        """Reports a slow step without killing anything. The file of an attempt holds its last slow step."""
        state = next((item.state for item in evidences if item.state.rank == slow.rank), evidences[0].state)
        message = (
            f"no sign of life for {slow.seconds:.1f} s in {state.phase} after step {state.step} (usually at most "
            f"{slow.bound:.1f} s); it counts as a hang after {self.hangs.bound(slow.phase):.1f} s "
            "(elastic.hang_timeout_s), or when the state of a rank proves that it is one"
        )
        path = self._write_evidence("slow", evidences, collectives=False)
        self._event(
            "slow_step", step=state.step, rank=culprit([item.state for item in evidences])[0], phase=state.phase,
            seconds=round(slow.seconds, 1), message=message, stacks=str(path),
        )  # fmt: skip

    def _report_hang(self, silence: Silence, evidences: Sequence[Evidence], proven: Proof | None) -> WorkerFailure:
        states = [item.state for item in evidences]
        rank, reason = culprit(states) if proven is None else (proven.rank, proven.reason)
        if rank is None and self.of_command:  # what its ranks wait for is not known
            rank = silence.rank
            reason = "was silent longest"
        evidence = next((item for item in evidences if item.state.rank == rank), evidences[0])
        seconds = f"{silence.seconds:.1f} s"
        if not self.of_command:
            seconds += f" in {evidence.state.phase} after step {evidence.state.step}"
        allowed = f" (elastic.hang_timeout_s allows {silence.bound:.1f})" if proven is None else ""
        message = f"no sign of life for {seconds}{allowed}; " + (reason if rank is None else f"rank {rank} {reason}")
        path = self._write_evidence("hang", evidences)
        plain = tuple(asdict(state) for state in states)
        self._event(
            "hang_detected", step=evidence.state.step, rank=rank, phase=evidence.state.phase,
            seconds=round(silence.seconds, 1), message=message, stacks=str(path), ranks=plain,
        )  # fmt: skip
        text = f"{message}\nthe stacks of all ranks of this node: {path}\n{evidence.text()}"
        return WorkerFailure(
            evidence.state.rank, Failure.HANG, message, text, time.time(), waits=rank is None, states=plain
        )  # fmt: skip

    def _report_timeout(self, late: WorkerFailure, evidences: Sequence[Evidence]) -> None:
        """Reports what the other ranks do before they are killed: one of them may not have entered the collective."""
        path = self._write_evidence("timeout", evidences)
        message = f"a collective timed out on rank {late.rank}; the stacks of the ranks that still run: {path}"
        plain = tuple(asdict(item.state) for item in evidences)
        self._event("collective_timed_out", rank=late.rank, message=message, stacks=str(path), ranks=plain)

    def _write_evidence(self, what: str, evidences: Sequence[Evidence], collectives: bool = True) -> Path:
        folder = self.run.logs / "stacks"
        attempt = 0 if self._events is None else self._events.attempt
        path = folder / f"{what}-{self.node}-{attempt:03d}.txt"
        contents = {path: "\n".join(item.text() for item in evidences).encode()}
        for item in evidences if collectives else ():
            name = f"collectives-{attempt:03d}-{rank_writer(item.state.rank)}.json"
            contents[folder / name] = item.collectives or b""

        def write() -> None:
            folder.mkdir(exist_ok=True)
            for file, content in contents.items():
                file.write_bytes(content)

        self._write(path, write, sum(map(len, contents.values())))
        return path

    def _write(self, path: Path, write: Callable[[], None], size: int) -> None:
        if self._events is not None:
            self._events.writer.put(path, lambda again: write(), size)

    def _event(self, event: str, *, step: int | None = None, **details: object) -> None:
        if self._events is not None:
            self._events.write(event, step=step, node=self.node, **details)
