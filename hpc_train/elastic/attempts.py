"""The attempts of a job in the run directory: each is claimed and published, and what happened between them is told.

One attempt on one node: start the workers, watch them, end all when one fails, and say how it went.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from socket import socket
from typing import Any

import psutil

from hpc_train.cluster.allocation import Allocation, mapping
from hpc_train.config.schema import Config
from hpc_train.elastic.channel import Message
from hpc_train.elastic.coordinator import FailureReport, Leave, Start
from hpc_train.elastic.decision import RestartDecision, WorkerFailure, is_secondary, root_cause
from hpc_train.elastic.fabric import Fabric
from hpc_train.elastic.logs import WorkerLog
from hpc_train.elastic.rendezvous import Meeting, bind, withdraw
from hpc_train.elastic.requeue import JobEnd, request
from hpc_train.elastic.store import Stores
from hpc_train.elastic.watch import Watch
from hpc_train.elastic.worker_process import ensure_warm_parent
from hpc_train.elastic.workers import Workers
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import EventLog
from hpc_train.run.exits import EXITS, Action, Exit, Failure
from hpc_train.run.files import patiently
from hpc_train.run.requests import StopRequests


@dataclass
class Attempts:
    """Kept by the hub."""

    run: RunDirectory
    config: Config
    allocation: Allocation
    end: JobEnd | None
    stores: Stores
    fabric: Fabric
    events: EventLog  # of this node's agent, in any attempt
    _newest: int | None = field(default=None, init=False)  # of this job; an agent that wakes up may find later ones

    def begin(self, start: Start) -> Message:
        """Prepares the next attempt; returns what the agents are told of it."""
        if start.cause is not None:
            self._tell_failure(start.cause, self._events())
        self._newest = attempt = patiently(self.run.claim_attempt)
        listener = bind(self.allocation, f"{self.allocation.job_id or self.run.path}:{attempt}")
        environment = self.fabric.decide(start, self._events())
        meeting = self._meeting(attempt, start, listener.getsockname()[1], environment)
        patiently(lambda: meeting.publish(self.run))
        self.stores.offer(attempt, listener)
        self._tell_start(start, meeting)
        return asdict(meeting)

    def leave(self, leave: Leave) -> int:
        """Tells how the job ended; returns the exit code of its agents."""
        if self.succeeded() is not None:
            return Exit.STOPPED
        if self._newest is None and leave.decision.action in (Action.REFUSE, Action.FAIL):
            # who waits for the job looks for its end in an attempt of its own
            self._newest = patiently(self.run.claim_attempt)
        events = self._events()
        if leave.cause is not None:
            self._tell_failure(leave.cause, events, refused=leave.decision.action is Action.REFUSE)
        leave, code = self._ask_for_requeue(leave, events)
        action = leave.decision.action
        if code is not Exit.GAVE_UP or action is Action.GIVE_UP:
            self._tell_end(leave, code, events)
        try:
            if self.end is not None:
                self.end.tell(code)
            withdraw(self.run, self.allocation.launch_id)
        except OSError as error:  # the agents know the end all the same
            print(f"how the job ends cannot be written into the run directory: {error}", file=sys.stderr)
        return code

    def succeeded(self) -> str | None:
        """Why this hub has no say any more: its agent was frozen, and another one has decided how the job goes on."""
        return "another agent acts for the job" if self.end is not None and self.end.succeeded() else None

    def _ask_for_requeue(self, leave: Leave, events: EventLog) -> tuple[Leave, Exit]:
        """The exit code, and what is left of a requeue for which the job cannot ask."""
        action, reason, end = leave.decision.action, leave.decision.reason, self.end
        if action is not Action.REQUEUE or end is None:
            return leave, EXITS[action]
        try:
            return leave, patiently(lambda: request(end, self.config, events, reason))
        except OSError as error:
            reason = f"{reason}; the job cannot ask to run again: {error}. {_resume(self.run)}"
            return replace(leave, decision=RestartDecision(Action.FAIL, reason)), Exit.FAILED

    def _events(self) -> EventLog:
        return self.events.of(max(0, self.run.newest_attempt()) if self._newest is None else self._newest)

    def _meeting(self, attempt: int, start: Start, port: int, environment: dict[str, str]) -> Meeting:
        return Meeting(
            attempt=attempt,
            launch_id=self.allocation.launch_id,
            job_id=self.allocation.job_id,
            node=self.allocation.node_name,
            pid=os.getpid(),
            started=time.time(),
            address=self.allocation.address,
            port=port,
            nodes=len(start.nodes),
            gpus_per_node=min(node.gpus for node in start.nodes),
            workers_per_node=min(node.workers for node in start.nodes),
            layout=start.layout,
            order=tuple(node.number for node in start.nodes),
            environment=environment,
        )

    def _tell_start(self, start: Start, meeting: Meeting) -> None:
        events = self._events()
        gpus = self.allocation.nodes * meeting.gpus_per_node  # those that the job holds
        began = psutil.Process().create_time()
        events.write(
            "started", layout=str(meeting.layout), world_size=meeting.layout.world_size, gpus=gpus, began=began,
            job_id=meeting.job_id, launch=meeting.launch_id, nodes=[node.name for node in start.nodes],
        )  # fmt: skip
        if start.before:
            self._tell_change(start, events)
        elif self.end is not None and self.end.unasked():
            reason = "somebody (scontrol requeue), or Slurm itself: a preemption, nodes that were lost"
            events.write("requeued_unasked", reason=reason)
        names = [f"{node.name} ({node.switch})" for node in start.nodes if node.switch is not None]
        if len(names) == len(start.nodes) > 1:
            print("ranks by node:", *mapping(meeting.layout, names, meeting.workers_per_node), sep="\n  ", flush=True)

    def _tell_change(self, start: Start, events: EventLog) -> None:
        assert start.cause is not None
        seconds = round(time.monotonic() - start.cause.noticed, 3)
        reason, before, now = start.cause.failure.failure, set(start.before), set(start.nodes)
        added, gone = [[node.name for node in nodes] for nodes in (now - before, before - now)]
        if added:
            events.write("spare_used", nodes=added, instead_of=gone)
        if len(now) < len(before):
            events.write("shrunk", nodes=len(now), before=len(before), without=gone)
        events.write("restarted", reason=reason, seconds=seconds, world_size=start.layout.world_size)
        on = f"on {len(now)} of {len(before)} nodes" if len(now) < len(before) else "in place"
        on = f"{on}, {', '.join(added)} for {', '.join(gone)}" if added else on
        print(f"restarted {on} as attempt {events.attempt}", file=sys.stderr, flush=True)

    def _tell_failure(self, cause: FailureReport, events: EventLog, refused: bool = False) -> None:
        """Writes a failure where people and programs look: the event log and standard error."""
        failure = cause.failure
        name = "node_lost" if failure.failure is Failure.NODE_LOST else "worker_failed"
        events.write(name, traceback=failure.traceback, **_details(cause))
        print(failure.message if refused else _text(cause, self.run, events.attempt), file=sys.stderr, flush=True)

    def _tell_end(self, leave: Leave, code: Exit, events: EventLog) -> None:
        action, reason = leave.decision.action, leave.decision.reason
        details = {} if leave.cause is None else _details(leave.cause)
        if action is Action.GIVE_UP:
            events.write("gave_up", exit_code=int(code), **details | {"message": reason})
            print(f"given up: {reason}", file=sys.stderr)
        elif action in (Action.FAIL, Action.REFUSE):
            events.write("failed", exit_code=int(code), **{"message": reason} | details)
            if reason and (action is Action.FAIL or leave.cause is None):  # a refusal holds its own advice
                print(reason, file=sys.stderr)
        else:
            name = "finished" if action is Action.FINISH else "stopped"
            events.write(name, exit_code=int(code), reason=leave.stop or reason, **details)
            if leave.cause is None and reason:
                print(reason, file=sys.stderr)


def _resume(run: RunDirectory) -> str:
    return f"This goes on: python -m hpc_train resume {run.path}"


def _details(cause: FailureReport) -> dict[str, Any]:
    failure = cause.failure
    return {"node": cause.node, "rank": failure.rank, "class": failure.failure, "message": failure.message}


def _text(cause: FailureReport, run: RunDirectory, attempt: int) -> str:
    failure = cause.failure
    if failure.failure in (Failure.NODE_LOST, Failure.UNFIT_NODE):
        return failure.message
    head = f"rank {failure.rank} on {cause.node} failed ({failure.failure}):"
    if is_secondary(failure):
        head += " most likely the echo of a failure that left no trace"
    log = run.logs / f"{cause.node}-{attempt:03d}.log"
    return f"{head}\n{failure.traceback.rstrip()}\nall output of this node: {log}"


TICK_S = 0.25
# From a failure until the other workers are killed: time for the true cause to arrive.
ECHO_GRACE_S = 3.0  # after the echo of another failure
REPORT_GRACE_S = 0.1  # after an exception that may be an echo with words of its own


@dataclass(frozen=True)
class Outcome:
    """How the workers of this node ended; ``failure`` is the first real one, ``step`` the furthest of them."""

    exit: Exit
    failure: WorkerFailure | None = None
    step: int = 0


def run_attempt(
    specs: Sequence[WorkerSpec],
    listener: socket | None,
    log: WorkerLog,
    stop: StopRequests,
    stop_grace_s: float,
    on_tick: Callable[[], None],
    entry: str,
    watch: Watch,
) -> Outcome:
    """Runs the workers ``specs`` to their end. No worker is alive when this returns or raises."""
    workers = Workers(log)
    try:
        _start(workers, specs, listener, entry)
        _watch(workers, stop, stop_grace_s, on_tick, watch)
    finally:
        workers.kill()
        log.close()
    return replace(_outcome(workers, stop_grace_s), step=max((worker.step for worker in workers), default=0))


def _start(workers: Workers, specs: Sequence[WorkerSpec], listener: socket | None, entry: str) -> None:
    pid = ensure_warm_parent()
    try:
        for spec in specs:
            workers.start(pid, spec, listener if spec.rank == 0 else None, entry)
    except (EOFError, ConnectionError) as error:  # the warm parent is gone, and its workers with it
        message = f"the warm parent ended while it started rank {spec.rank}: {error!r}; its words are above"
        workers.fail(WorkerFailure(spec.rank, Failure.KILLED, message, message, time.time()))
    finally:
        if listener is not None:
            listener.close()  # rank 0 has it now, and the port is to close with it


def _watch(
    workers: Workers, stop: StopRequests, stop_grace_s: float, on_tick: Callable[[], None], watch: Watch
) -> None:
    failed_at: float | None = None
    while workers.alive:
        workers.wait(TICK_S)
        watch.look(workers)
        now = time.monotonic()
        if workers.failures and failed_at is None:
            failed_at = now
            for worker in workers.alive:
                worker.signal(signal.SIGTERM)
        if stop.requested:
            _pass_on(workers)
        late = stop.requested and now - stop.since > stop_grace_s
        if late or (failed_at is not None and now - failed_at > _grace(workers.failures)):
            workers.kill()
        on_tick()


def _grace(failures: Sequence[WorkerFailure]) -> float:
    causes = [failure for failure in failures if not is_secondary(failure)]
    if not causes:
        return ECHO_GRACE_S
    return REPORT_GRACE_S if all(failure.exit_code is None for failure in causes) else 0.0


def _pass_on(workers: Workers) -> None:
    for worker in workers:
        if worker.ready and not worker.told_to_stop:
            worker.told_to_stop = True
            worker.signal(signal.SIGUSR2)


def _outcome(workers: Workers, stop_grace_s: float) -> Outcome:
    if workers.failures:
        cause = root_cause(workers.failures)
        return Outcome(Exit.REFUSED if cause.failure is Failure.REFUSED else Exit.FAILED, cause)
    late = [worker for worker in workers if worker.end is None]
    if late:
        message = f"had not stopped {stop_grace_s:g} s after the request (elastic.stop_grace_s)"
        return Outcome(Exit.FAILED, WorkerFailure(late[0].rank, Failure.KILLED, message, message, time.time()))
    stopped = any(worker.end and worker.end["kind"] == "stopped" for worker in workers)
    return Outcome(Exit.STOPPED if stopped else Exit.DONE)
