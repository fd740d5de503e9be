"""Claims and records the attempts of a job in the run directory, and runs the workers of one node in an attempt."""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from hpc_train.checkpoint.space import UNKNOWN_S, stop_time
from hpc_train.config.schema import Config
from hpc_train.config.values import runs_command
from hpc_train.elastic.decision import ANNOUNCEMENT, RestartDecision, is_secondary
from hpc_train.elastic.fabric import Fabric
from hpc_train.elastic.nodes import have_been_checked
from hpc_train.elastic.rendezvous.addresses import AttemptSpec, bind, withdraw
from hpc_train.elastic.rendezvous.channel import Message
from hpc_train.elastic.rendezvous.messages import FailureReport, Leave, Start
from hpc_train.elastic.rendezvous.store import Stores
from hpc_train.elastic.requeue import (
    JobEnd,
    find_killed_step,
    is_announcement,
    progress_of,
    request,
    request_without_marker,
)
from hpc_train.elastic.resize import JobNodes
from hpc_train.elastic.workers import prune_logs
from hpc_train.errors import UserError
from hpc_train.machine.allocation import Allocation
from hpc_train.machine.placement import has_blocks, judge, mapping, network_of, parse_switch_sizes
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog, age_of_this_process
from hpc_train.run.exits import EXITS, SHELL_SIGNALS, Action, Exit, Failure
from hpc_train.run.files import in_time, patiently, read_or
from hpc_train.run.record import drop_copy, with_digest
from hpc_train.schedulers.current import NoJob
from hpc_train.schedulers.scheduler import CurrentJob
from hpc_train.schedulers.slurm.client import show_topology
from hpc_train.telemetry.tracebacks import own_frames
from hpc_train.units import counted

Result = TypeVar("Result")

REPLACED = "Slurm has ended or requeued the job"

AGENT_LEAVES_S = 3.0  # until the processes of an agent that leaves have ended; Slurm kills those that have not
CLAIM_S = 120.0  # how long a restart waits for a file system on which it cannot claim the next attempt


@dataclass
class Attempts:
    """Claims, publishes and reports the attempts of a job; owned by the rendezvous server."""

    run: RunDirectory
    config: Config
    allocation: Allocation
    end: JobEnd | None
    stores: Stores
    fabric: Fabric
    events: EventLog  # of this node's agent, in any attempt
    joined: Callable[[], Collection[int]] = lambda: ()  # the numbers of the nodes whose agents are connected
    # the newest attempt of this job; another job may have a later one after this agent was suspended
    _newest: int | None = field(default=None, init=False)
    nodes: JobNodes = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = JobNodes(self._job, self.allocation.nodes)

    def begin(self, start: Start) -> Message:
        """Prepares the next attempt; returns its specification for the agents."""
        if start.cause is not None:
            self._report_failure(start.cause, self._events())
        self.nodes.note_released([number for number, _ in start.released])
        self._newest = attempt = patiently(self.run.claim_attempt, CLAIM_S)
        listener = bind(self.allocation, f"{self.allocation.job_id or self.run.path}:{attempt}")
        environment = self.fabric.decide(start, self._events())
        spec = self._attempt_spec(attempt, start, listener.getsockname()[1], environment)
        fabric = self.fabric.of_one_node
        self.events.writer.put(spec.path(self.run), lambda again: spec.publish(self.run, fabric))  # for readers
        self.events.writer.put(self.run.logs, lambda again: prune_logs(self.run, attempt), wait=False)
        self.stores.offer(attempt, listener)
        self._report_start(start, spec)
        if start.released:
            threading.Thread(target=self._release, args=(start.released,), name="release-nodes", daemon=True).start()
        return spec.message()

    def _release(self, released: Sequence[tuple[int, str]]) -> None:
        """Gives nodes back to the scheduler when their agents have left."""
        time.sleep(AGENT_LEAVES_S)
        problem = self.nodes.release(released)
        if problem is not None:
            names = [name for _, name in released]
            message = f"{', '.join(names)} are idle until the job ends, since they cannot be given back: {problem}"
            self._events().write("warning", message=message)
            print(f"warning: {message}", file=sys.stderr, flush=True)

    def leave(self, leave: Leave) -> int:
        """Records how the job ended; returns the exit code of its agents."""
        self.nodes.cancel_waiting(self.joined())
        if self.superseded() is not None or leave.decision.reason == REPLACED:
            return Exit.STOPPED
        if self._newest is None and leave.decision.action in (Action.REFUSE, Action.FAIL, Action.STOP):
            # commands that wait for the job look for its end in a new attempt
            with suppress(OSError):
                self._newest = in_time(self.run.claim_attempt)
        events = self._events()
        if leave.cause is not None:
            self._report_failure(leave.cause, events, refused=leave.decision.action is Action.REFUSE)
        if leave.outage is not None:
            details: dict[str, Any] = {"class": Failure.FILE_SYSTEM, "message": leave.outage}
            events.write("file_system_failed", **details)
        if leave.decision.action is Action.STOP and self.end is not None and is_announcement(leave.stop, self.run):
            reason = f"{self._job.scheduler} announced the time limit or a preemption ({leave.stop})"
            leave = replace(leave, decision=RestartDecision(Action.REQUEUE, reason))
        leave, code = self._ask_for_requeue(leave, events)
        action = leave.decision.action
        if code is not Exit.GAVE_UP or action is Action.GIVE_UP:
            self._report_end(leave, code, events)

        def record_end() -> None:
            if self.end is not None:
                self.end.record(code, self._command_exit_code(leave.cause))
            withdraw(self.run, self.allocation.launch_id)

        try:
            in_time(record_end)
        except OSError as error:  # the agents know the exit code anyway
            print(f"cannot record the end of the job in the run directory: {error}", file=sys.stderr)
        return code

    def superseded(self) -> str | None:
        """Returns why this server may no longer decide: its agent was frozen and another agent has taken over."""
        end = self.end
        try:
            succeeded = end is not None and in_time(end.has_successor)
        except OSError:
            return None
        if succeeded:
            return "another agent has taken over the job"
        return None

    def replaced_by_slurm(self) -> str | None:
        """Returns why this server may no longer decide: its node was frozen until Slurm gave it up."""
        if self._job.is_current_start() is False:
            return REPLACED
        return None

    @property
    def _job(self) -> CurrentJob:
        if self.end is None:
            return NoJob()
        return self.end.job

    def _ask_for_requeue(self, leave: Leave, events: EventLog) -> tuple[Leave, Exit]:
        """Returns ``leave`` and the exit code.

        The decision in ``leave`` changes to a failure if the job cannot request the requeue.
        """
        action = leave.decision.action
        reason = leave.decision.reason
        end = self.end
        if action is not Action.REQUEUE or end is None:
            return leave, EXITS[action]
        if not reason and leave.stop == ANNOUNCEMENT:
            reason = f"{self._job.scheduler} announced the time limit or a preemption (USR2)"
        try:
            return leave, in_time(lambda: request(end, self.config, events, reason))
        except OSError as error:
            reason = f"{reason}; the batch script cannot be asked to requeue the job: {error}"
        refusal = request_without_marker(end, self.config)
        if refusal is None:
            events.write("requeued", reason=reason)
            return replace(leave, decision=RestartDecision(action, reason)), Exit.STOPPED
        reason = f"{reason}; {refusal}. Resume with: python -m hpc_train resume {self.run.path}"
        return replace(leave, decision=RestartDecision(Action.FAIL, reason)), Exit.FAILED

    def _events(self) -> EventLog:
        newest = self._newest
        if newest is None:
            with suppress(OSError):
                newest = in_time(self.run.newest_attempt)
        return self.events.of(max(0, newest or 0))

    def _attempt_spec(self, attempt: int, start: Start, port: int, environment: dict[str, str]) -> AttemptSpec:
        run = self.run
        launch = self.allocation.launch_id
        names = [node.name for node in start.nodes]
        return AttemptSpec(
            attempt=attempt,
            launch_id=launch,
            job_id=self.allocation.job_id,
            node=self.allocation.node_name,
            pid=os.getpid(),
            started=self.events.now(),
            address=self.allocation.address,
            port=port,
            nodes=len(start.nodes),
            gpus_per_node=min(node.gpus for node in start.nodes),
            workers_per_node=min(node.workers for node in start.nodes),
            layout=start.layout,
            order=tuple(node.number for node in start.nodes),
            environment=environment,
            # otherwise the ranks check the nodes again
            checked=read_or(lambda: have_been_checked(run, launch, names), False),
            store_prefix=secrets.token_hex(16),
            # one agent estimates it, because N agents would read the files of the run at the same time
            stop_grace_s=read_or(lambda: stop_time(self.config, run, len(start.nodes)).seconds, float(UNKNOWN_S)),
            held_nodes=self.nodes.held + start.guests,
        )

    def _report_start(self, start: Start, spec: AttemptSpec) -> None:
        events = self._events()
        gpus = spec.held_nodes * spec.gpus_per_node  # held by the job
        began = events.now() - age_of_this_process()
        events.write(
            "started", layout=str(spec.layout), world_size=spec.layout.world_size, gpus=gpus, began=began,
            job_id=spec.job_id, launch=spec.launch_id, nodes=[node.name for node in start.nodes],
            record=_read(lambda: with_digest(self.run.record())),
        )  # fmt: skip
        events.writer.put(events.path, lambda again: drop_copy(self.run.path), wait=False)
        if start.before:
            self._report_change(start, events)
        elif self.end is not None and (
            killed := _read(lambda: find_killed_step(self.run, spec.launch_id, spec.attempt - 1))
        ):
            events.write("agents_killed", **killed.details(self.config.cluster.mem))
        elif self.end is not None and self.end.was_requeued_externally():
            # the job did not ask for it: has Slurm lost nodes of the attempt before?
            begun = [
                event for event in self.run.read_events() if event.name == "started" and event.attempt < spec.attempt
            ]
            lost = self._job.unavailable_nodes(begun[-1]["nodes"]) if begun else {}
            details: dict[str, Any] = {"reason": "requeued by a person (scontrol requeue) or by Slurm (a preemption)"}
            if lost:
                words = ", ".join(f"node {node} is {state}" for node, state in lost.items())
                message = f"Slurm requeued the job: {words}"
                details = {"class": Failure.NODE_LOST, "rank": None, "node": next(iter(lost)), "message": message}
            events.write("requeued_by_slurm", **details)
        report_placement(start, self.config.cluster.extra.get("switches"), events)

    def _report_change(self, start: Start, events: EventLog) -> None:
        before = set(start.before)
        now = set(start.nodes)
        added, gone = [[node.name for node in nodes] for nodes in (now - before, before - now)]
        if start.resize is not None or start.cause is None:
            reason = "a joiner ends" if gone else "lost replicas are replaced"
            if start.resize is not None:
                reason = start.resize.reason
            self._report_resize(start, reason, gone, events)
        if start.cause is None:
            return
        seconds = round(time.monotonic() - start.cause.noticed, 3)
        reason = start.cause.failure.failure
        if added and start.resize is None:
            events.write("spare_used", nodes=added, instead_of=gone)
        if len(now) < len(before) and start.resize is None:
            events.write("shrunk", nodes=len(now), before=len(before), without=gone)
        events.write("restarted", reason=reason, seconds=seconds, world_size=start.layout.world_size)
        where = f"on {len(now)} of {len(before)} nodes" if len(now) < len(before) else "in place"
        where = f"{where}, {', '.join(added)} replacing {', '.join(gone)}" if added else where
        print(f"restarted {where} as attempt {events.attempt}", file=sys.stderr, flush=True)

    def _report_resize(self, start: Start, reason: str, gone: Sequence[str], events: EventLog) -> None:
        lost = 0
        if self.config.run.command is None:
            lost = max(0, start.reached - read_or(lambda: progress_of(self.run, self.config), start.reached))
        before = len(start.before)
        nodes = counted(len(start.nodes), "node", "nodes")
        message = f"continues on {nodes} instead of {before} ({reason}), as {start.layout}"
        if lost:
            message += f"; {counted(lost, 'step', 'steps')} since the last checkpoint are repeated"
        details: dict[str, Any] = {"nodes": len(start.nodes), "before": before, "without": gone, "steps": lost}
        events.write("resized", reason=reason, message=message, **details)
        print(message, file=sys.stderr, flush=True)

    def _report_failure(self, cause: FailureReport, events: EventLog, refused: bool = False) -> None:
        """Writes a failure to the event log and to standard error."""
        failure = cause.failure
        name = "node_lost" if failure.failure is Failure.NODE_LOST else "worker_failed"
        details = _details(cause) | ({"gpus": failure.gpus} if failure.gpus else {})
        events.write(name, traceback=failure.traceback, **details)
        print(
            failure.message if refused else _failure_text(cause, self.run, events.attempt), file=sys.stderr, flush=True
        )

    def _command_exit_code(self, cause: FailureReport | None) -> int | None:
        """Returns the exit code of the process of ``run.command`` that has failed, as a shell shows it; None if the
        attempt ended in another way.
        """
        code = None if cause is None else cause.failure.exit_code
        if code is None or not runs_command(self.config):
            return None
        return code if code >= 0 else SHELL_SIGNALS - code

    def _report_end(self, leave: Leave, code: Exit, events: EventLog) -> None:
        action = leave.decision.action
        reason = leave.decision.reason
        details = {} if leave.cause is None else _details(leave.cause)
        command_exit_code = self._command_exit_code(leave.cause)
        if command_exit_code is not None:
            details["command_exit_code"] = command_exit_code
        if action is Action.GIVE_UP:
            events.write("stopped_retrying", exit_code=int(code), **details | {"message": reason})
            print(f"given up: {reason}", file=sys.stderr)
        elif action in (Action.FAIL, Action.REFUSE):
            events.write("failed", exit_code=int(code), **{"message": reason} | details)
            if reason and (action is Action.FAIL or leave.cause is None):  # a UserError contains its own fix
                print(reason, file=sys.stderr)
        else:
            name = "finished" if action is Action.FINISH else "stopped"
            if action is Action.FINISH and runs_command(self.config):  # a worker of ours records it itself
                events.record(self.run, result={"steps": progress_of(self.run, self.config)})
            events.write(name, exit_code=int(code), reason=leave.stop or reason, **details)
            if reason and (leave.cause is None or action is Action.REQUEUE):
                print(reason, file=sys.stderr)


def report_placement(start: Start, switches: str | None, events: EventLog) -> None:
    """Prints the ranks of each node, and warns if the network between the nodes does not suit the layout.

    Without a position of every node in the network it prints nothing.
    """
    names = [f"{node.name} ({node.position})" for node in start.nodes if node.position is not None]
    if len(names) < len(start.nodes) or len(names) == 1:
        return
    workers = min(node.workers for node in start.nodes)
    print("ranks by node:", *mapping(start.layout, names, workers), sep="\n  ", flush=True)
    addresses = [node.switch for node in start.nodes if node.switch is not None]
    if len(addresses) < len(names) or network_of(addresses, {}) is None:
        return
    network = network_of(addresses, parse_switch_sizes(show_topology()))
    judgment = []
    if network is not None:
        judgment = judge(network, start.layout, workers, blocks=has_blocks(), switches=switches)
    if judgment:
        events.write("warning", message="; ".join(judgment))
        *problems, fix = judgment
        print(*(f"warning: {problem}" for problem in problems), f"  {fix}", sep="\n", file=sys.stderr, flush=True)


def _read(call: Callable[[], Result]) -> Result | None:
    """Returns the result of ``call``; None if the file system fails or what it reads is damaged."""
    try:
        return in_time(call)
    except (OSError, UserError):
        return None


def _details(cause: FailureReport) -> dict[str, Any]:
    failure = cause.failure
    return {"node": cause.node, "rank": failure.rank, "class": failure.failure, "message": failure.message}


def _failure_text(cause: FailureReport, run: RunDirectory, attempt: int) -> str:
    failure = cause.failure
    if failure.failure in (Failure.NODE_LOST, Failure.UNFIT_NODE):
        return failure.message
    head = f"rank {failure.rank} on {cause.node} failed ({failure.failure}):"
    if is_secondary(failure):
        head += " most likely secondary to a failure that left no trace"
    log = run.logs / f"{cause.node}-{attempt:03d}.log"
    lines = [head, own_frames(failure.traceback.rstrip()), *failure.gpus, f"all output of this node: {log}"]
    return "\n".join(lines)
