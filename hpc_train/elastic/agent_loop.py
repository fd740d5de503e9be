"""Follows the orders of the rendezvous server, runs the workers of this node, and notices a deleted run directory."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hpc_train.checkpoint.store import CheckpointStore
from hpc_train.config.schema import Config
from hpc_train.elastic.attempts import run_attempt
from hpc_train.elastic.decision import OVER_BUDGET, Budget, WorkerFailure
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
from hpc_train.elastic.script import FolderLooks, Script
from hpc_train.elastic.watch import OtherNodes, Watch
from hpc_train.elastic.workers import WorkerLog
from hpc_train.machine.allocation import Allocation
from hpc_train.machine.environment import threads_per_rank
from hpc_train.machine.network.rank_binding import Device, bindings, devices
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import Clock, EventLog
from hpc_train.run.exits import Exit
from hpc_train.run.file_writer import FileWriter
from hpc_train.run.files import BackgroundCall, read_or
from hpc_train.run.requests import StacksRequests, StopRequests
from hpc_train.schedulers.slurm.client import is_current_start, was_suspended

TICK_S = 0.25
MIN_PAUSE_S = 5.0  # on a busy machine, a process may wait seconds for a core
LEAVE_S = 15.0  # wait at most this long for the server to release all agents


def write_pause(pause: Pause, events: EventLog, in_job: bool) -> None:
    """Writes an event about a time in which the batch host did not execute; asks Slurm whether it suspended the job."""
    by_slurm = in_job and was_suspended(pause.until - pause.seconds)
    reason = "the processes of the batch host did not execute"
    if by_slurm:
        reason = "Slurm suspended the job"
    event = "suspended" if by_slurm else "paused"
    seconds = round(pause.seconds, 3)
    until = events.clock.of_wall(pause.until)
    events.write(event, seconds=seconds, until=until, reason=f"{reason} for {seconds:.0f} s")


class EndedByServer(Exception):
    """Raised when the attempt is ended because of a failure on another node, or because the run was deleted."""


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
    stacks: StacksRequests | None = None  # only in the agent with the server
    looks: FolderLooks | None = None  # into run.progress_dir; only in the agent with the server
    accepted_stop: Callable[[], str | None] = lambda: None  # why the server stops the job; in the agent with the server
    _attempt: int | None = field(default=None, init=False)  # the newest attempt it knows of
    _stop_reported: bool = field(default=False, init=False)
    _replaced: bool = field(default=False, init=False)  # Slurm ended this start of the job while the node was frozen

    def work(self) -> int:
        """Follows the server's orders until it releases the agent; returns the exit code.

        Raises:
            ServerLost: the server is gone. No worker of this node is left.
        """
        client = self._join()
        while True:
            try:
                order = client.order(TICK_S)
                self._tick(client)
                if order is not None and order["kind"] == "leave":
                    client.leave(LEAVE_S)
                    return int(order["code"])
                if order is not None:
                    self._take_part(client, AttemptSpec.parse(order["spec"]))
            except ServerLost:
                if client.silent:  # its kernel accepts connections even if its agent is frozen
                    raise
                client = self._join()  # a live server readmits a node that was silent for too long
            except KeyboardInterrupt:
                client.quit("killed by a second Ctrl-C; steps after the last checkpoint are lost")

    def _join(self) -> RendezvousClient:
        timeout = self.config.elastic.heartbeat_timeout_s
        return RendezvousClient.connect(self.server, self.node, timeout, nodes=self.allocation.nodes)

    def _tick(self, client: RendezvousClient) -> None:
        self.on_tick()
        if self.stacks is not None and (number := self.stacks.new(time.monotonic())) is not None:
            client.send_stacks_request(number)
        self.watch.stacks_requested = client.stacks_requested
        if self.looks is not None and (changed := self.looks.new(time.monotonic())) is not None:
            client.send_progress(changed)
        if isinstance(self.entry, Script):
            self.entry.progress.note(client.progress)
        if self.stores is not None and self.budget.is_used_up:
            self.stop.request(OVER_BUDGET)
        while self.stores is not None and not client.pauses.empty():  # the other nodes stopped with this one
            self._report_pause(client.pauses.get())
        if self.stop.reason is not None:
            client.send_stop(self.stop.reason)
        if self.stores is not None and not self._stop_reported:  # one agent writes, because Slurm signals all of them
            self._report_stop()

    def _report_stop(self) -> None:
        """Writes an event about the first stop request to any agent, unless Slurm has requeued the job meanwhile."""
        reason = self.accepted_stop() or self.stop.reason
        if reason is None:
            return
        self._stop_reported = True
        if not self._replaced:
            self._events().write("stop_requested", reason=reason)

    def _report_pause(self, pause: Pause) -> None:
        """Writes an event about the pause, unless Slurm has requeued the job meanwhile."""
        if pause.seconds < MIN_PAUSE_S:
            return
        end = JobEnd.of_this_process(self.run)
        if end is not None and is_current_start(end.restart) is False:
            self._replaced = True  # the next start of the job writes the events from now on
            return
        write_pause(pause, self._events(), in_job=end is not None)

    def _events(self) -> EventLog:
        attempt = read_or(self.run.newest_attempt, 0) if self._attempt is None else self._attempt
        return self.events.of(max(0, attempt))

    def _check_store(self, client: RendezvousClient, attempt: int) -> None:
        if self.stores is not None and self.stores.lost:
            self.stores.stop()
            client.send_store_lost(attempt)

    def _take_part(self, client: RendezvousClient, spec: AttemptSpec) -> None:
        """Runs this node's workers in one attempt, unless it is a spare."""
        self._attempt = spec.attempt
        if self.stores is None:
            self.events = replace(self.events, clock=Clock.at(spec.started))
        self.budget.hold(self.allocation.nodes * spec.gpus_per_node)
        if self.stores is not None:
            self.stores.serve(spec.attempt)
        if self.node.number not in spec.order:
            return

        def tick() -> None:
            self._tick(client)
            if self.stores is not None and (deleted := self.deletion.finding()) is not None:  # one agent looks
                client.quit(deleted)
                raise EndedByServer
            if self.stores is None or not self.stores.warm_parent_died:  # otherwise the workers died too and report it
                self._check_store(client, spec.attempt)
            if client.must_save_stacks(spec.attempt):
                self.watch.keep_stacks()
            if client.is_to_end(spec.attempt):
                raise EndedByServer

        others = _other_nodes(client, spec.attempt) if spec.nodes > 1 else None
        self.watch.begin(self.events.of(spec.attempt), spec.layout, self._patience_s(spec), others)
        specs = self._specs(spec)
        try:
            self.gpu_errors.wait_for_memory(self.events.of(spec.attempt), tick, self.stop)
            log = WorkerLog(self.run.logs / f"{self.allocation.node_name}-{spec.attempt:03d}.log", self.output)
            began = time.monotonic()
            outcome = run_attempt(specs, log, self.stop, spec.stop_grace_s, tick, self.entry, self.watch)
            failure = self._examined(outcome.failure, specs[0].rank, time.monotonic() - began)
            report = NodeReport(outcome.exit, failure, max(outcome.step, self._furthest_step(spec.attempt)))
        except EndedByServer:
            report = NodeReport(Exit.FAILED, None, self._furthest_step(spec.attempt))
        client.send_attempt_end(spec.attempt, report)

    def _examined(self, failure: WorkerFailure | None, first_rank: int, attempt_s: float) -> WorkerFailure | None:
        """Returns ``failure`` with what the GPUs of this node, whose first rank is ``first_rank``, report about it."""
        if failure is None:
            return None
        return self.gpu_errors.examine(failure, failure.rank - first_rank, attempt_s)

    def _patience_s(self, spec: AttemptSpec) -> float:
        set_already = {setting.name: setting.value for setting in self.node.facts.settings}
        return patience_s(spec.nodes, spec.gpus_per_node, spec.environment | set_already)

    @property
    def _visible_gpus(self) -> str:
        """``cluster.visible_gpus``, or ``all`` for a script, which uses its local rank as the index of its GPU."""
        if isinstance(self.entry, Script):
            return "all"
        return self.config.cluster.visible_gpus

    def _furthest_step(self, attempt: int) -> int:
        newest = read_or(CheckpointStore(self.run.checkpoints).newest, None)
        last: dict[str, Any] = read_or(lambda: self.run.newest_metrics(attempt), {})
        return max(last.get("step", 0), 0 if newest is None else newest.step)

    def _specs(self, spec: AttemptSpec) -> list[WorkerSpec]:
        local_workers = min(spec.workers_per_node, spec.layout.world_size)
        position = spec.order.index(self.node.number)
        bound = bindings(self.node.facts, local_workers)
        visible = devices(self.node.facts)
        config = _pickled(self.config)
        environment = spec.environment | self.events.clock.environment()
        return [
            WorkerSpec(
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
                **_device_and_environment(local_rank, visible, environment, self._visible_gpus),
                cpus=bound[local_rank].cpus,
                stop_grace_s=spec.stop_grace_s,
                checked=spec.checked,
                config=config,
            )
            for local_rank in range(local_workers)
        ]


def _pickled(config: Config) -> bytes | None:
    """Returns ``WorkerSpec.config``; None if it has a class of the user's own that cannot be imported by its name."""
    try:
        return pickle.dumps(config)
    except (pickle.PicklingError, AttributeError, TypeError):
        return None


def _other_nodes(client: RendezvousClient, attempt: int) -> OtherNodes:
    return OtherNodes(lambda: client.send_stacks_saved(attempt), lambda: client.have_all_saved(attempt))


def _device_and_environment(
    local_rank: int, visible: Sequence[Device], environment: Mapping[str, str], visible_gpus: str
) -> dict[str, Any]:
    """Returns the rank's device and its own variables. The user's settings take precedence.

    Args:
        visible: the devices that the agent sees, in the order of local rank.
        visible_gpus: ``cluster.visible_gpus``. CUDA shows a process only one MIG slice in any case.
    """
    new_variables = {name: value for name, value in environment.items() if name not in os.environ}
    device = visible[local_rank] if local_rank < len(visible) else None
    if device is not None and (device.is_slice or (visible_gpus == "own" and device.is_nvidia)):
        return {"cuda_device": 0, "environment": new_variables | {"CUDA_VISIBLE_DEVICES": device.name}}
    return {"cuda_device": local_rank, "environment": new_variables}


LOOK_EVERY_S = 2.0
LOOK_S = 1.0  # the agent waits at most this long for the file system
LOOKS = 5  # in a row that must agree


class DeletionWatch:
    """Looks for ``config.yaml``, which exists as long as the run does."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._device = run.path.stat().st_dev
        self._look = BackgroundCall(self._is_deleted)
        self._next = 0.0
        self._agree = 0

    def finding(self) -> str | None:
        """Returns what has happened to a run directory that was deleted. It is called a few times per second."""
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
