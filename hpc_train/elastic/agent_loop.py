"""Follows the orders of the rendezvous server, runs the workers of this node, and notices a deleted run directory."""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hpc_train.checkpoint.store import CheckpointStore
from hpc_train.config.schema import Config
from hpc_train.config.values import runs_per_node
from hpc_train.elastic.decision import ANNOUNCEMENT, OVER_BUDGET, Budget, WorkerFailure, is_secondary, root_cause
from hpc_train.elastic.gpu_errors import GpuErrors
from hpc_train.elastic.hang_bounds import patience_s
from hpc_train.elastic.nodes import Node
from hpc_train.elastic.rendezvous.addresses import AttemptSpec, ServerAddress
from hpc_train.elastic.rendezvous.client import (
    Pause,
    RendezvousClient,
    ServerLost,
)
from hpc_train.elastic.rendezvous.messages import NodeReport
from hpc_train.elastic.rendezvous.store import Stores
from hpc_train.elastic.requeue import JobEnd
from hpc_train.elastic.resize import JOINERS_EVERY_S, Growth, Joiner, growth_of, refusal_of
from hpc_train.elastic.script import FolderLooks, Script
from hpc_train.elastic.watch import OtherNodes, Watch
from hpc_train.elastic.worker_process import crash_of, ensure_warm_parent
from hpc_train.elastic.workers import Echo, WorkerLog, Workers, cpu_limit
from hpc_train.errors import UserError
from hpc_train.machine.allocation import Allocation
from hpc_train.machine.environment import threads_per_rank
from hpc_train.machine.network.rank_binding import Binding, bindings, devices
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import Clock, EventLog, age_of_this_process
from hpc_train.run.exits import CRASHED_IMPORT, Action, Exit, Failure
from hpc_train.run.file_writer import FileWriter
from hpc_train.run.files import BackgroundCall, read_or
from hpc_train.run.requests import HoldRequest, NewRequests, ResizeRequest, StopFlag, StopRequests
from hpc_train.schedulers.current import current_job
from hpc_train.units import counted

TICK_S = 0.25
MIN_PAUSE_S = 5.0  # on a busy machine, a process may wait seconds for a core
LEAVE_S = 15.0  # wait at most this long for the server to release all agents


def write_pause(pause: Pause, events: EventLog, in_job: bool) -> None:
    """Writes an event about a time in which the batch host did not execute; asks Slurm whether it suspended the job."""
    by_slurm = in_job and current_job().was_suspended(pause.until - pause.seconds)
    reason = "the processes of the batch host did not execute"
    if by_slurm:
        reason = "Slurm suspended the job"
    event = "suspended" if by_slurm else "paused"
    seconds = round(pause.seconds, 3)
    until = events.clock.of_wall(pause.until)
    events.write(event, seconds=seconds, until=until, reason=f"{reason} for {seconds:.0f} s")


class EndedByServer(Exception):
    """Raised when the attempt ends because of a failure on another node, or because the run was deleted."""


@dataclass
class Agent:
    """Takes part in the attempts of a job on behalf of one node."""

    run: RunDirectory
    config: Config
    allocation: Allocation
    node: Node
    server: ServerAddress
    stores: Stores | None  # only in the agent with the server
    stop: StopRequests
    watch: Watch
    gpu_errors: GpuErrors
    budget: Budget
    on_tick: Callable[[], None]
    entry: str | Script
    events: EventLog  # of this agent, in any attempt
    output: FileWriter  # of the logs of its workers
    deletion: DeletionWatch
    echo: FileWriter | None = None  # of what the workers print, to standard output
    stacks: NewRequests[int] | None = None  # only in the agent with the server
    holds: NewRequests[HoldRequest | None] | None = None  # only in the agent with the server
    resizes: NewRequests[ResizeRequest | None] | None = None  # only in the agent with the server
    looks: FolderLooks | None = None  # into run.progress_dir; only in the agent with the server
    growth: Growth | None = None  # only in the agent with the server
    present: Callable[[], dict[int, Node]] = dict  # the nodes that have joined; in the agent with the server
    is_guest: bool = False  # whether the node belongs to a joiner job
    stop_at: float = math.inf  # when it stops because of the time limit, in seconds since 1970
    accepted_stop: Callable[[], str | None] = lambda: None  # why the server stops the job; in the agent with the server
    _attempt: int | None = field(default=None, init=False)  # the newest attempt it knows of
    _began: float = field(default_factory=time.time, init=False)
    _spec: AttemptSpec | None = field(default=None, init=False)  # of that attempt
    _look_at: float = field(default=0.0, init=False)  # when it next looks at joiners, and whether the run is to grow
    _is_requested: bool = field(default=False, init=False)  # whether a user decides on the number of nodes
    _resize: ResizeRequest | None = field(default=None, init=False)  # the newest one that it has accepted
    _submission: tuple[ResizeRequest, BackgroundCall[tuple[Joiner, Node]]] | None = field(default=None, init=False)
    _stop_reported: bool = field(default=False, init=False)
    has_joined: bool = field(default=False, init=False)  # whether the run holds this node of a joiner
    _replaced: bool = field(default=False, init=False)  # Slurm ended this run of the job while the node was frozen

    def work(self) -> int:
        """Follows the server's orders until it releases the agent; returns the exit code.

        Raises:
            ServerLost: the server is gone. No worker of this node is left.
        """
        timeout_s = self.config.elastic.heartbeat_timeout_s
        client = None
        while True:
            # a live server readmits a node that was silent for too long
            client = client or RendezvousClient.connect(self.server, self.node, timeout_s, nodes=self.allocation.nodes)
            try:
                order = client.order(TICK_S)
                self._tick(client)
                if order is not None and order["kind"] == "leave":
                    client.leave(LEAVE_S)
                    if not self.is_guest:
                        return int(order["code"])
                    why = "it has ended, or needs fewer nodes"
                    if order["action"] == Action.REQUEUE:
                        why = "its first job is requeued, and asks for more nodes when it starts"
                    print(f"{self.node.name} leaves the run: {why}", file=sys.stderr, flush=True)
                    return Exit.DONE
                if order is not None:
                    self._take_part(client, AttemptSpec.parse(order["spec"]))
            except ServerLost:
                if client.silent:  # its kernel accepts connections even if its agent is frozen
                    raise
                client = None
            except KeyboardInterrupt:
                client.quit("killed by a second Ctrl-C; steps after the last checkpoint are lost")

    def _tick(self, client: RendezvousClient) -> None:
        self.on_tick()
        now = time.monotonic()
        if self.stacks is not None and (number := self.stacks.new(now)) is not None:
            client.send_stacks_request(number)
        self.watch.stacks_requested = client.stacks_requested
        if self.holds is not None and (request := self.holds.new(now)) is not None:
            client.send_hold_request(request)
        self.watch.hold_requested = client.hold_requested
        self.watch.lost_replicas = client.lost_replicas(self._attempt)
        self._report_losses(client)
        if self.growth is not None and self._spec is not None:
            self._change_nodes(self.growth, self._spec, client, now)
        if self.looks is not None and (changed := self.looks.new(now)) is not None:
            client.send_progress(changed)
        if isinstance(self.entry, Script):
            self.entry.progress.note(client.progress)
        if self.stores is not None and self.budget.is_used_up:
            self.stop.request(OVER_BUDGET)
        if self.stores is not None and time.time() >= self.stop_at:
            self.stop.request(ANNOUNCEMENT)  # as by the signal with which Slurm announces the limit
        while self.stores is not None and not client.pauses.empty():  # the other nodes stopped with this one
            self._report_pause(client.pauses.get())
        if self.stop.reason is not None and self.is_guest:
            client.send_retirement()
        elif self.stop.reason is not None:
            client.send_stop(self.stop.reason)
        # one agent reports the first stop request, because Slurm signals all of them
        if self.stores is not None and not self._stop_reported and (reason := self.accepted_stop() or self.stop.reason):
            self._stop_reported = True
            if not self._replaced:
                self._events().write("stop_requested", reason=reason)

    def _report_losses(self, client: RendezvousClient) -> None:
        while self.stores is not None and not client.losses.empty():
            details = client.losses.get()
            self._events().write("replica_lost", **details)
            print(f"{details['message']}; the other replicas go on", file=sys.stderr, flush=True)

    def _change_nodes(self, growth: Growth, spec: AttemptSpec, client: RendezvousClient, now: float) -> None:
        """Answers requests for another number of nodes, and asks for more nodes if the run grows by itself."""
        if self._submission is not None:  # until it has ended, a further request waits
            self._await_submission(*self._submission, spec, client)
        elif self.resizes is not None and (request := self.resizes.new(now)) is not None:
            self._is_requested |= request.of_user
            self._answer(request, growth, spec, client)
        elif now >= self._look_at:
            self._look_at = now + JOINERS_EVERY_S
            present = self.present()
            for problem in growth.nodes.drop_ended(present):
                self._refuse(self._resize, problem)
            may_grow = not self._is_requested and growth.nodes.job.why_no_joiner() is None
            idle = [number for number in present if number >= growth.nodes.count and number not in spec.order]
            joins = bool(idle) or bool(growth.nodes.waiting(present))  # nodes of a joiner that will soon train
            if may_grow and self.config.elastic.grow != "never" and not joins:
                more = read_or(lambda: growth_of(self.run, self.config, spec), None)
                if more is not None:
                    self._answer(more, growth, spec, client)

    def _answer(self, request: ResizeRequest, growth: Growth, spec: AttemptSpec, client: RendezvousClient) -> None:
        """Passes a request to resize the run on to the server, or refuses it; the event log and the output say which.

        A request for the present number of nodes withdraws one that is not fulfilled yet.
        """
        of_earlier_start = request.time < self._began
        if of_earlier_start and not request.of_user:
            return
        pending = self._resize if self._resize is not None and self._resize.nodes != spec.nodes else None
        refusal = None
        if request.nodes != spec.nodes:
            refusal = refusal_of(request, self.config, spec, current_job(), growth.nodes.held)
        elif pending is None and of_earlier_start:  # which has fulfilled it
            return
        elif pending is None:
            refusal = "the run trains on as many"
        if refusal is not None:
            self._refuse(request, refusal)
            return
        present = self.present()
        if pending is not None and pending.nodes == request.nodes:
            waiting = [joiner.job_id for joiner in growth.nodes.waiting(present) if not joiner.is_automatic]
            if waiting:
                self._accept(request, spec, client, f"; job {waiting[-1]} waits for them")
                return
        growth.nodes.cancel_waiting(present)
        missing = request.nodes + self.config.elastic.spares - len(present)
        if request.nodes <= spec.nodes or missing <= 0:
            self._accept(request, spec, client)
            return
        names = [node.name for node in present.values()]
        self._submission = request, BackgroundCall(lambda: growth.submit(missing, names, not request.of_user))

    def _await_submission(
        self,
        request: ResizeRequest,
        submission: BackgroundCall[tuple[Joiner, Node]],
        spec: AttemptSpec,
        client: RendezvousClient,
    ) -> None:
        try:
            joiner, host = submission.poll(0.0)
        except TimeoutError:
            return
        except (UserError, OSError, subprocess.SubprocessError) as error:
            self._submission = None
            self._refuse(request, f"{error.what}; {error.fix}" if isinstance(error, UserError) else str(error))
            return
        self._submission = None
        client.send_invitation(joiner.first, joiner.count, host)
        self._accept(request, spec, client, f"; job {joiner.job_id} adds {joiner.count} when it starts")

    def _refuse(self, request: ResizeRequest | None, refusal: str) -> None:
        self._is_requested = True  # a run that grows by itself would be refused again
        details: dict[str, Any] = {} if request is None else {"nodes": request.nodes, "reason": request.reason}
        self._events().write("resize_refused", message=refusal, **details)
        print(f"not resized: {refusal}", file=sys.stderr, flush=True)

    def _accept(self, request: ResizeRequest, spec: AttemptSpec, client: RendezvousClient, how: str = "") -> None:
        pending = self._resize
        instead = ""
        if pending is not None and pending.nodes not in (spec.nodes, request.nodes):
            instead = f", instead of {pending.nodes}"
        nodes = counted(request.nodes, "node", "nodes")
        message = f"{request.reason} asked for {nodes}{instead}; the run trains on {spec.nodes}{how}"
        details: dict[str, Any] = {"nodes": request.nodes, "before": spec.nodes, "reason": request.reason}
        self._events().write("resize_requested", message=message, **details)
        print(message, file=sys.stderr, flush=True)
        self._resize = request
        client.send_resize(request)

    def _report_pause(self, pause: Pause) -> None:
        """Writes an event about the pause, unless Slurm has requeued the job meanwhile."""
        if pause.seconds < MIN_PAUSE_S:
            return
        end = JobEnd.of_this_process(self.run)
        if end is not None and end.job.is_current_start() is False:
            self._replaced = True  # the next start of the job writes the events from now on
            return
        write_pause(pause, self._events(), in_job=end is not None)

    def _events(self) -> EventLog:
        attempt = read_or(self.run.newest_attempt, 0) if self._attempt is None else self._attempt
        return self.events.of(max(0, attempt))

    def _take_part(self, client: RendezvousClient, spec: AttemptSpec) -> None:
        """Runs this node's workers in one attempt, unless it is a spare."""
        attempt = self._attempt = spec.attempt
        if self.stores is None:
            self.events = replace(self.events, clock=Clock.at(spec.started))
        self._spec = spec
        if self.is_guest and not self.has_joined:
            self.has_joined = True
            held_s = round(age_of_this_process(), 3)
            self.events.of(attempt).write("joined", seconds=held_s, gpus=spec.gpus_per_node)
        self.budget.hold(spec.held_nodes * spec.gpus_per_node)
        if self.stores is not None:
            self.stores.serve(attempt)
        if self.node.number not in spec.order:
            return

        stop = AttemptStop(self.stop)

        def tick() -> None:
            self._tick(client)
            if client.must_stop(attempt):
                stop.ordered.request("resize")
            if self.stores is not None:
                if (deleted := self.deletion.finding()) is not None:  # one agent looks
                    client.quit(deleted)
                    raise EndedByServer
                if (
                    self.stores.lost and not self.stores.warm_parent_died
                ):  # otherwise the workers died too and report it
                    self.stores.stop()
                    client.send_store_lost(attempt)
            if client.must_save_stacks(attempt):
                self.watch.keep_stacks()
            if client.is_to_end(attempt):
                raise EndedByServer

        others = None
        if spec.nodes > 1:
            others = OtherNodes(lambda: client.send_stacks_saved(attempt), lambda: client.have_all_saved(attempt))
        set_already = {setting.name: setting.value for setting in self.node.facts.settings}
        patience = patience_s(spec.nodes, spec.gpus_per_node, spec.environment | set_already)
        self.watch.begin(self.events.of(attempt), spec.layout, patience, others)
        specs = self._specs(spec)
        try:
            self.gpu_errors.wait_for_memory(self.events.of(attempt), tick, self.stop)
            path = self.run.logs / f"{self.allocation.node_name}-{attempt:03d}.log"
            echo = None if self.echo is None else Echo(self.echo, shows_rank=spec.layout.world_size > 1)
            log = WorkerLog(path, self.output, echo=echo)
            began = time.monotonic()
            outcome = run_attempt(specs, log, stop, spec.stop_grace_s, tick, self.entry, self.watch)
            failure = outcome.failure
            if failure is not None:
                failure = self.gpu_errors.examine(failure, failure.rank - specs[0].rank, time.monotonic() - began)
            report = NodeReport(outcome.exit, failure, max(outcome.step, self._furthest_step(attempt)))
        except EndedByServer:
            report = NodeReport(Exit.FAILED, None, self._furthest_step(attempt))
        client.send_attempt_end(attempt, report)

    def _furthest_step(self, attempt: int) -> int:
        newest = read_or(CheckpointStore(self.run.checkpoints).newest, None)
        last: dict[str, Any] = read_or(lambda: self.run.newest_metrics(attempt), {})
        return max(last.get("step", 0), 0 if newest is None else newest.step)

    def _specs(self, spec: AttemptSpec) -> list[WorkerSpec]:
        local_workers = min(spec.workers_per_node, spec.layout.world_size)
        position = spec.order.index(self.node.number)
        bound = bindings(self.node.facts, local_workers)
        visible = devices(self.node.facts)
        if runs_per_node(self.config):  # the process has all GPUs and CPUs of the node
            bound = (Binding(None, 0, "one process per node"),)
            visible = ()
        config = _pickled(self.config)
        # a script uses its local rank as the index of its GPU
        sees_own_gpu = self.config.cluster.visible_gpus == "own" and not isinstance(self.entry, Script)
        variables = spec.environment | self.events.clock.environment()
        specs = []
        for local_rank in range(local_workers):
            cuda_device = local_rank
            environment = {name: value for name, value in variables.items() if name not in os.environ}
            for device in visible[local_rank : local_rank + 1]:
                if device.is_slice or (sees_own_gpu and device.is_nvidia):  # CUDA shows a process only one MIG slice
                    cuda_device = 0
                    environment["CUDA_VISIBLE_DEVICES"] = device.name
            worker = WorkerSpec(
                run_dir=str(self.run.path),
                attempt=spec.attempt,
                rank=position * local_workers + local_rank,
                local_rank=local_rank,
                local_world_size=local_workers,
                node_rank=position,
                nodes=spec.nodes,
                layout=spec.layout,
                master_address=spec.address,
                master_port=spec.port,
                store_prefix=spec.store_prefix,
                gpus_per_node=spec.gpus_per_node,
                threads=threads_per_rank(self.config.train.threads, local_workers, bound[local_rank].cores),
                cuda_device=cuda_device,
                environment=environment,
                cpus=bound[local_rank].cpus,
                stop_grace_s=spec.stop_grace_s,
                checked=spec.checked,
                config=config,
            )
            specs.append(worker)
        return specs


def _pickled(config: Config) -> bytes | None:
    """Returns ``WorkerSpec.config``; None if it has a custom class that cannot be imported by its name."""
    try:
        return pickle.dumps(config)
    except (pickle.PicklingError, AttributeError, TypeError):
        return None


LOOK_EVERY_S = 2.0
LOOK_S = 1.0  # the agent waits at most this long for the file system
LOOKS = 5  # in a row that must agree


class DeletionWatch:
    """Watches ``config.yaml``, which exists as long as the run does."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._device = run.path.stat().st_dev
        self._look = BackgroundCall(self._is_deleted)
        self._next = 0.0
        self._agree = 0

    def finding(self) -> str | None:
        """Returns a description of the deletion if the run directory was deleted. Call it a few times per second."""
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + LOOK_EVERY_S
        try:
            self._agree = self._agree + 1 if self._look.poll(LOOK_S) else 0
        except OSError:  # it fails or hangs
            self._agree = 0
        if self._agree < LOOKS:
            return None
        return (
            f"the run directory {self._run.path} was deleted, or its config.yaml, while the job was running: the run "
            "cannot be resumed without its checkpoints. The job is stopped; start the run again under this or another "
            "run.name"
        )

    def _is_deleted(self) -> bool:
        if self._run.config.exists():
            return False
        path = next(path for path in (self._run.path, *self._run.path.absolute().parents) if path.exists())
        return path.stat().st_dev == self._device  # otherwise its file system is not mounted any more


@dataclass(frozen=True)
class AttemptStop:
    """Combines the stop requests to the agent with the server's order to stop the workers of one attempt."""

    agent: StopRequests
    ordered: StopFlag = field(default_factory=StopFlag)

    @property
    def requested(self) -> bool:
        return self.agent.requested or self.ordered.requested

    @property
    def since(self) -> float:
        """Returns the time of the stop request on the monotonic clock."""
        return self.agent.since if self.agent.requested else self.ordered.since


# The time from a failure until the other workers are killed, so that the primary cause can arrive.
SECONDARY_GRACE_S = 3.0  # after a secondary failure
REPORT_GRACE_S = 0.1  # after an exception, which may still be secondary


@dataclass(frozen=True)
class Outcome:
    """Describes how the workers of this node ended. ``failure`` is the primary failure, ``step`` the furthest step of
    any worker."""

    exit: Exit
    failure: WorkerFailure | None = None
    step: int = 0


def run_attempt(
    specs: Sequence[WorkerSpec],
    log: WorkerLog,
    stop: AttemptStop,
    stop_grace_s: float,
    on_tick: Callable[[], None],
    entry: str | Script,
    watch: Watch,
) -> Outcome:
    """Runs the workers ``specs`` to their end. When this returns or raises, no worker is alive. Unless all workers
    succeeded, the processes that they forked are gone too.
    """
    workers = Workers(log, lambda: stop.requested)
    try:
        _start(workers, specs, entry)
        _watch(workers, stop, stop_grace_s, on_tick, watch)
    finally:
        workers.kill()
        if not workers.succeeded:
            workers.end_children()
        log.close()
    return replace(_outcome(workers, stop_grace_s), step=max((worker.step for worker in workers), default=0))


def _start(workers: Workers, specs: Sequence[WorkerSpec], entry: str | Script) -> None:
    if isinstance(entry, Script):
        for spec in specs:
            workers.start_script(spec, entry)
        return
    pid = ensure_warm_parent()
    try:
        for spec in specs:
            workers.start(pid, spec, entry)
    except (EOFError, ConnectionError) as error:  # the warm parent died, and its workers with it
        crash = crash_of(pid)
        if crash is None:
            failure = Failure.KILLED
            message = (
                f"the warm parent ended while it started rank {spec.rank}: {error!r}; its output is above{cpu_limit()}"
            )
        else:  # as would happen in the next attempt
            failure = Failure.USER_ERROR
            message = f"{CRASHED_IMPORT}: its process was ended by {crash.name}; its output is above"
        workers.fail(WorkerFailure(spec.rank, failure, message, message, time.time()))


def _watch(workers: Workers, stop: AttemptStop, stop_grace_s: float, on_tick: Callable[[], None], watch: Watch) -> None:
    failed_at: float | None = None
    while workers.alive:
        workers.wait(TICK_S)
        watch.check(workers)
        now = time.monotonic()
        if workers.failures and failed_at is None:
            failed_at = now
            for worker in workers.alive:
                worker.warn_of_failure()
        if stop.requested:
            for worker in workers:
                worker.request_stop()
        late = stop.requested and now - stop.since > stop_grace_s
        if late or (failed_at is not None and now - failed_at > _grace(workers.failures)):
            workers.kill()
        on_tick()


def _grace(failures: Sequence[WorkerFailure]) -> float:
    causes = [failure for failure in failures if not is_secondary(failure)]
    if not causes:
        return SECONDARY_GRACE_S
    if all(failure.exit_code is None for failure in causes):
        return REPORT_GRACE_S
    return 0.0


def _outcome(workers: Workers, stop_grace_s: float) -> Outcome:
    if workers.failures:
        cause = root_cause(workers.failures)
        return Outcome(Exit.REFUSED if cause.failure is Failure.REFUSED else Exit.FAILED, cause)
    late = [worker for worker in workers if worker.end is None]
    if late:
        message = f"did not stop within {stop_grace_s:g} s of the request (elastic.stop_grace_s)"
        return Outcome(Exit.FAILED, WorkerFailure(late[0].rank, Failure.KILLED, message, message, time.time()))
    stopped = any(worker.end and worker.end["kind"] == "stopped" for worker in workers)
    return Outcome(Exit.STOPPED if stopped else Exit.DONE)
