"""The agent of a node: reads the frozen config, runs the node's workers, and says how the run ended.

It never imports torch. Whatever started it (a foreground command, submitit, a batch script), it does the same.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from socket import socket
from typing import Any

import psutil

from hpc_train.checkpoint.stop_time import stop_time
from hpc_train.cluster.allocation import Allocation, current_allocation, workers_per_node
from hpc_train.cluster.caches import node_local_caches
from hpc_train.cluster.environment import apply, threads_per_rank, worker_environment
from hpc_train.cluster.topology import mapping
from hpc_train.config.errors import ConfigError
from hpc_train.config.freeze import load
from hpc_train.config.layout import resolve_layout
from hpc_train.config.schema import Config
from hpc_train.elastic.attempt import Outcome, run_attempt
from hpc_train.elastic.failures import WorkerFailure, is_echo
from hpc_train.elastic.logs import WorkerLog
from hpc_train.elastic.places import order_of_nodes, tell_place
from hpc_train.elastic.rendezvous import Meeting, bind, wait_for_meeting
from hpc_train.elastic.requeue import ANNOUNCEMENT, decide
from hpc_train.elastic.stop_requests import StopRequests, watch_signals
from hpc_train.run import lease
from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import EventLog
from hpc_train.run.exits import Exit
from hpc_train.run.frozen_code import frozen_code, use
from hpc_train.run.job_end import JobEnd
from hpc_train.run.sharing import write_for_group
from hpc_train.run.worker_spec import WorkerSpec

ENTRY = "hpc_train.train.worker:train"
MEETING_TIMEOUT_S = 300.0
STOPPED_TOGETHER_S = 60.0  # rank 0 may still be sending to W&B
CAUSE_TOLD_S = 6.0  # more than an agent waits for the workers beside a failed one

Reserve = Callable[[StopRequests], AbstractContextManager[None]]


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
            with _sole_agent(run, allocation), reserve(stop) if reserve else nullcontext():
                outcome = _run(run, allocation, stop, on_tick or _nothing, entry)
        except ConfigError as error:
            print(error, file=sys.stderr)
            outcome = Outcome(Exit.REFUSED)
        return outcome.exit if end is None else _end_job(end, run, allocation, outcome, stop)


@contextmanager
def _sole_agent(run: RunDirectory, allocation: Allocation) -> Iterator[None]:
    with lease.hold(run) if allocation.node_rank == 0 else nullcontext():
        yield


def _run(
    run: RunDirectory, allocation: Allocation, stop: StopRequests, on_tick: Callable[[], None], entry: str
) -> Outcome:
    config = load(run)
    use(frozen_code(run))
    if config.run.group is not None:
        write_for_group()
    meeting, listener = (None, None) if stop.requested else _meet(run, config, allocation, stop)
    if meeting is None:
        return Outcome(Exit.STOPPED)
    events = EventLog.open(run, f"agent-{allocation.node_name}", meeting.attempt)
    log = WorkerLog(run.logs / f"{allocation.node_name}-{meeting.attempt:03d}.log")
    specs = _specs(run, config, allocation, meeting)
    variables = worker_environment(allocation.nodes, meeting.gpus_per_node, specs[0].threads)
    try:
        with node_local_caches(f"{allocation.launch_id}-{allocation.node_name}") as caches:
            environment = apply([*variables, *caches])
            if allocation.node_rank == 0:
                run.update_record(environment=environment)
            events.write("started", **_start(allocation, meeting))
            grace_s = stop_time(config, run, allocation.nodes).seconds
            outcome = run_attempt(specs, listener, log, stop, grace_s, on_tick, entry)
    except KeyboardInterrupt:
        print("killed by a second Ctrl-C: steps after the last checkpoint are lost", file=sys.stderr)
        events.write("failed", exit_code=int(Exit.FAILED), message="killed by a second Ctrl-C")
        return Outcome(Exit.FAILED)
    _tell(outcome, allocation, log, events, stop)
    return outcome


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


def _tell(outcome: Outcome, allocation: Allocation, log: WorkerLog, events: EventLog, stop: StopRequests) -> None:
    """Writes how the attempt ended where people and programs look: the event log and standard error."""
    if stop.reason is not None:
        events.write("stop_requested", reason=stop.reason)
    code = int(outcome.exit)
    if outcome.failure is None:
        events.write("stopped" if outcome.exit is Exit.STOPPED else "finished", exit_code=code, reason=stop.reason)
        return
    failure = outcome.failure
    details: dict[str, Any] = {
        "node": allocation.node_name,
        "rank": failure.rank,
        "class": failure.failure,
        "message": failure.message,
    }
    events.write("worker_failed", traceback=failure.traceback, **details)
    events.write("failed", exit_code=code, **details)
    print(_text(failure, allocation, outcome.exit, log), file=sys.stderr)


def _end_job(end: JobEnd, run: RunDirectory, allocation: Allocation, outcome: Outcome, stop: StopRequests) -> Exit:
    """Tells the batch script how it ended. Who leaves first with another code than 0 ends the other nodes' agents, so
    agents that stopped leave together, and those that only saw the echo of a failure let the others tell it."""
    code = outcome.exit
    if code is Exit.STOPPED and allocation.node_rank == 0 and stop.reason == ANNOUNCEMENT:
        events = EventLog.open(run, f"agent-{allocation.node_name}", max(0, run.newest_attempt()))
        code = decide(end, load(run).elastic, events)
    end.tell(code)
    if code in (Exit.STOPPED, Exit.GAVE_UP):
        end.wait_for_all(allocation.nodes, STOPPED_TOGETHER_S)
    elif outcome.failure is not None and is_echo(outcome.failure):
        end.wait_for_all(allocation.nodes, CAUSE_TOLD_S)
    return code


def _text(failure: WorkerFailure, allocation: Allocation, code: Exit, log: WorkerLog) -> str:
    if code is Exit.REFUSED:
        return failure.message
    head = f"rank {failure.rank} on {allocation.node_name} failed ({failure.failure}):"
    if allocation.nodes > 1 and is_echo(failure):
        return f"{head} most likely the echo of another node's failure; its traceback is in {log.path}"
    return f"{head}\n{failure.traceback.rstrip()}\nall output of this node: {log.path}"


def _nothing() -> None:
    pass
