"""The agent of a node: reads the frozen config, runs the node's workers, and says how the run ended.

It never imports torch. Whatever started it (a foreground command, submitit, a batch script), it does the same.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from socket import socket
from typing import Any

import psutil

from hpc_train.checkpoint.stop_time import stop_time
from hpc_train.checkpoint.store import CheckpointStore
from hpc_train.cluster.allocation import Allocation, current_allocation, workers_per_node
from hpc_train.cluster.caches import node_local_caches
from hpc_train.cluster.environment import apply, threads_per_rank, worker_environment
from hpc_train.cluster.topology import mapping
from hpc_train.config.errors import ConfigError
from hpc_train.config.freeze import load
from hpc_train.config.layout import resolve_layout
from hpc_train.config.schema import Config
from hpc_train.elastic.attempt import Outcome, run_attempt
from hpc_train.elastic.decision import Decision, Ended, History, decide
from hpc_train.elastic.failures import WorkerFailure, is_echo
from hpc_train.elastic.logs import WorkerLog
from hpc_train.elastic.places import order_of_nodes, tell_place
from hpc_train.elastic.rendezvous import Meeting, bind, wait_for_meeting
from hpc_train.elastic.requeue import request
from hpc_train.elastic.stop_requests import StopRequests, watch_signals
from hpc_train.elastic.watch import Watch
from hpc_train.run import lease
from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import EventLog
from hpc_train.run.exits import EXITS, Action, Exit
from hpc_train.run.files import read_lines
from hpc_train.run.frozen_code import frozen_code, use
from hpc_train.run.job_end import JobEnd
from hpc_train.run.sharing import write_for_group
from hpc_train.run.worker_spec import WorkerSpec

ENTRY = "hpc_train.train.worker:train"
MEETING_TIMEOUT_S = 300.0
STOPPED_TOGETHER_S = 60.0  # rank 0 may still be sending to W&B
CAUSE_TOLD_S = 6.0  # more than an agent waits for the workers beside a failed one

AGAIN = (Action.RESTART, Action.REPLACE)

Reserve = Callable[[StopRequests], AbstractContextManager[None]]


@dataclass(frozen=True)
class Ending:
    """How the last attempt ended."""

    action: Action
    failure: WorkerFailure | None = None


def run_agent(
    run: RunDirectory,
    on_tick: Callable[[], None] | None = None,
    *,
    reserve: Reserve | None = None,
    entry: str = ENTRY,
) -> int:
    """Runs this node's workers of ``run`` to their end; returns the exit code.

    Args:
        on_tick: called a few times per second while workers run.
        reserve: a context that holds what the workers need (GPUs, cores); entering it may wait, and it returns early
            when a stop is requested.
        entry: what a worker calls, as "module:function".
    """
    allocation = current_allocation()
    end = JobEnd.of_this_process(run)
    with watch_signals() as stop:
        try:
            if end is not None:
                end.begin()
            with _sole_agent(run, allocation, stop), reserve(stop) if reserve else nullcontext():
                ending = _run(run, allocation, stop, on_tick or _nothing, entry)
        except ConfigError as error:
            print(error, file=sys.stderr)
            ending = Ending(Action.REFUSE)
        return EXITS[ending.action] if end is None else _end_job(end, run, allocation, ending)


@contextmanager
def _sole_agent(run: RunDirectory, allocation: Allocation, stop: StopRequests) -> Iterator[None]:
    if allocation.node_rank > 0:
        yield
        return
    with lease.hold(run, on_loss=lambda: stop.request("lease lost"), give_up=lambda: stop.requested):
        yield


def _run(
    run: RunDirectory, allocation: Allocation, stop: StopRequests, on_tick: Callable[[], None], entry: str
) -> Ending:
    """Attempt after attempt, until another would gain nothing."""
    config = load(run)
    use(frozen_code(run))
    if config.run.group is not None:
        write_for_group()
    history = History(furthest=_newest_step(run))
    watch = Watch.of(run, allocation.node_name, config)
    with node_local_caches(f"{allocation.launch_id}-{allocation.node_name}") as caches:
        while not stop.requested:
            meeting, listener = _meet(run, config, allocation, stop)
            if meeting is None:
                break
            specs = _specs(run, config, allocation, meeting)
            variables = worker_environment(allocation.nodes, meeting.gpus_per_node, specs[0].threads)
            environment = apply([*variables, *caches])
            if allocation.node_rank == 0:
                run.update_record(environment=environment)
            events = EventLog.open(run, f"agent-{allocation.node_name}", meeting.attempt)
            log = WorkerLog(run.logs / f"{allocation.node_name}-{meeting.attempt:03d}.log")
            events.write("started", **_start(allocation, meeting))
            grace_s = stop_time(config, run, allocation.nodes).seconds
            watch.begin(events, meeting.layout)
            try:
                outcome = run_attempt(specs, listener, log, stop, grace_s, on_tick, entry, watch)
            except KeyboardInterrupt:
                return _killed(events)
            ended = _ended(run, meeting.attempt, outcome, stop)
            decision, history = decide(history, ended), history.after(ended.step)
            if outcome.failure is not None:
                _tell_failure(outcome.failure, decision.action, allocation, log, events)
            if decision.action not in AGAIN or allocation.nodes > 1:
                return _tell_end(decision, outcome, allocation, events, stop)
            events.write("restarted", reason=str(ended.failure), step=ended.step)
    return Ending(Action.STOP)


def _newest_step(run: RunDirectory) -> int:
    newest = CheckpointStore(run.checkpoints).newest()
    return 0 if newest is None else newest.step


def _ended(run: RunDirectory, attempt: int, outcome: Outcome, stop: StopRequests) -> Ended:
    last = max((line["step"] for line in read_lines(run.metrics_file(attempt))), default=0)
    failure = None if outcome.failure is None else outcome.failure.failure
    return Ended(outcome.exit, failure, max(last, _newest_step(run)), stop.reason)


def _meet(
    run: RunDirectory, config: Config, allocation: Allocation, stop: StopRequests
) -> tuple[Meeting | None, socket | None]:
    tell_place(run, allocation)
    if allocation.node_rank > 0:
        return wait_for_meeting(run, allocation.launch_id, lambda: stop.requested, MEETING_TIMEOUT_S), None
    gpus, workers = workers_per_node(config.cluster)
    layout = resolve_layout(config, allocation.nodes, workers)
    order, names = order_of_nodes(run, allocation, lambda: stop.requested, MEETING_TIMEOUT_S)
    if names:
        print("ranks by node:", *mapping(layout, names, workers), sep="\n  ", flush=True)
    attempt = run.claim_attempt()
    listener = bind(allocation, f"{allocation.job_id or run.path}:{attempt}")
    meeting = Meeting(
        attempt=attempt,
        launch_id=allocation.launch_id,
        job_id=allocation.job_id,
        node=allocation.node_name,
        pid=os.getpid(),
        started=time.time(),
        address=allocation.address,
        port=listener.getsockname()[1],
        nodes=allocation.nodes,
        gpus_per_node=gpus,
        workers_per_node=workers,
        layout=layout,
        order=order,
    )
    meeting.publish(run)
    return meeting, listener


def _start(allocation: Allocation, meeting: Meeting) -> dict[str, Any]:
    """What the ledger (``run/ledger.py``) wants to know of an attempt. ``gpus``: those that the job holds."""
    return {
        "layout": str(meeting.layout),
        "world_size": meeting.layout.world_size,
        "gpus": allocation.nodes * meeting.gpus_per_node,
        "job_id": allocation.job_id,
        "launch": allocation.launch_id,
        "began": psutil.Process().create_time(),
    }


def _specs(run: RunDirectory, config: Config, allocation: Allocation, meeting: Meeting) -> list[WorkerSpec]:
    local_workers = min(meeting.workers_per_node, meeting.layout.world_size)
    position = meeting.order.index(allocation.node_rank)
    return [
        WorkerSpec(
            run_dir=str(run.path),
            attempt=meeting.attempt,
            rank=position * local_workers + local_rank,
            local_rank=local_rank,
            local_world_size=local_workers,
            node_rank=position,
            nodes=meeting.nodes,
            layout=meeting.layout,
            master_address=meeting.address,
            master_port=meeting.port,
            gpus_per_node=meeting.gpus_per_node,
            threads=threads_per_rank(config.train.threads, local_workers),
        )
        for local_rank in range(local_workers)
    ]


def _killed(events: EventLog) -> Ending:
    print("killed by a second Ctrl-C: steps after the last checkpoint are lost", file=sys.stderr)
    events.write("failed", exit_code=int(Exit.FAILED), message="killed by a second Ctrl-C")
    return Ending(Action.FAIL)


def _tell_failure(
    failure: WorkerFailure, action: Action, allocation: Allocation, log: WorkerLog, events: EventLog
) -> None:
    """Writes a failure where people and programs look: the event log and standard error."""
    events.write("worker_failed", traceback=failure.traceback, **_details(failure, allocation))
    print(_text(failure, allocation, action, log), file=sys.stderr)


def _details(failure: WorkerFailure, allocation: Allocation) -> dict[str, Any]:
    node, kind = allocation.node_name, failure.failure
    return {"node": node, "rank": failure.rank, "class": kind, "message": failure.message}


def _tell_end(
    decision: Decision, outcome: Outcome, allocation: Allocation, events: EventLog, stop: StopRequests
) -> Ending:
    if stop.reason is not None:
        events.write("stop_requested", reason=stop.reason)
    action = Action.FAIL if decision.action in AGAIN else decision.action
    code = int(EXITS[action])
    details = {} if outcome.failure is None else _details(outcome.failure, allocation)
    if action is Action.GIVE_UP:
        events.write("gave_up", exit_code=code, **details | {"message": decision.reason})
        print(f"given up: {decision.reason}", file=sys.stderr)
    elif details:
        events.write("failed", exit_code=code, **details)
        if decision.reason:
            print(decision.reason, file=sys.stderr)
    else:
        events.write("finished" if action is Action.FINISH else "stopped", exit_code=code, reason=stop.reason)
    return Ending(action, outcome.failure)


def _end_job(end: JobEnd, run: RunDirectory, allocation: Allocation, ending: Ending) -> Exit:
    """Tells the batch script how it ended. Who leaves first with another code than 0 ends the other nodes' agents, so
    agents that stopped leave together, and those that only saw the echo of a failure let the others tell it."""
    code = EXITS[ending.action]
    if ending.action is Action.REQUEUE and allocation.node_rank == 0:
        events = EventLog.open(run, f"agent-{allocation.node_name}", max(0, run.newest_attempt()))
        code = request(end, load(run).elastic, events)
    end.tell(code)
    if code in (Exit.STOPPED, Exit.GAVE_UP):
        end.wait_for_all(allocation.nodes, STOPPED_TOGETHER_S)
    elif ending.failure is not None and is_echo(ending.failure):
        end.wait_for_all(allocation.nodes, CAUSE_TOLD_S)
    return code


def _text(failure: WorkerFailure, allocation: Allocation, action: Action, log: WorkerLog) -> str:
    if action is Action.REFUSE:
        return failure.message
    head = f"rank {failure.rank} on {allocation.node_name} failed ({failure.failure}):"
    if allocation.nodes > 1 and is_echo(failure):
        return f"{head} most likely the echo of another node's failure; its traceback is in {log.path}"
    return f"{head}\n{failure.traceback.rstrip()}\nall output of this node: {log.path}"


def _nothing() -> None:
    pass
