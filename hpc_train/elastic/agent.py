"""The agent of a node runs the node's workers, attempt after attempt, as the rendezvous server orders.

It never imports torch and behaves the same however it was started (a foreground command, submitit, a batch script). The
agent of the batch host, or of the only node, also runs the rendezvous server.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from hpc_train.checkpoint.space import UNKNOWN_S, stop_time
from hpc_train.checkpoint.store import CheckpointStore
from hpc_train.cluster.allocation import (
    LOOPBACK,
    Allocation,
    current_allocation,
    listening_at,
    meeting_at,
    workers_per_node,
)
from hpc_train.cluster.environment import Variable, apply, node_local_caches, own_environment, threads_per_rank
from hpc_train.cluster.gpus import UnusableGpus, gpu_memory
from hpc_train.cluster.placement import switch_address
from hpc_train.config.schema import Config
from hpc_train.elastic.attempts import Attempts, run_attempt
from hpc_train.elastic.client import Pause, RendezvousClient, ServerLost, requeue_after_server_loss, wait_for_server
from hpc_train.elastic.coordinator import Coordinator, NodeReport
from hpc_train.elastic.decision import OVER_BUDGET, Budget, History, WorkerFailure, over_budget
from hpc_train.elastic.deletion import DeletionWatch
from hpc_train.elastic.fabric import Fabric
from hpc_train.elastic.gpu_errors import GpuErrors
from hpc_train.elastic.hang_bounds import patience_s
from hpc_train.elastic.logs import WorkerLog, nonfailing_streams
from hpc_train.elastic.nodes import Node, NodeFailures, Unfit, check_health
from hpc_train.elastic.rendezvous import AttemptSpec, ServerAddress, bind
from hpc_train.elastic.requeue import JobEnd
from hpc_train.elastic.server import RendezvousServer
from hpc_train.elastic.store import Stores
from hpc_train.elastic.watch import Watch
from hpc_train.elastic.worker_process import start_warm_parent
from hpc_train.errors import UserError
from hpc_train.fabric.node import this_node
from hpc_train.fabric.rank_binding import Device, bindings, devices
from hpc_train.plan.layout import resolve_layout
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.code import frozen_code, use_frozen_code
from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import EventLog
from hpc_train.run.exits import Exit
from hpc_train.run.file_writer import FileWriter
from hpc_train.run.files import in_time, last_line, write_for_group
from hpc_train.run.freeze import load
from hpc_train.run.lease import hold_lease
from hpc_train.run.processes import out_of_descriptors, raise_descriptor_limit, refuse_few_descriptors
from hpc_train.run.requests import StacksRequests, StopRequests, watch_signals
from hpc_train.slurm.client import is_current_start, is_suspended, was_suspended

ENTRY = "hpc_train.train.worker:train"
STORE = "hpc_train.elastic.store:serve"
TICK_S = 0.25
MIN_PAUSE_S = 5.0  # on a busy machine, a process may wait seconds for a core
LEAVE_S = 15.0  # wait at most this long for the server to release all agents

Result = TypeVar("Result")
Reserve = Callable[[StopRequests], AbstractContextManager[None]]


def run_agent(
    run: RunDirectory,
    on_tick: Callable[[], None] | None = None,
    *,
    reserve: Reserve | None = None,
    entry: str = ENTRY,
    store: str = STORE,
) -> int:
    """Runs this node's workers of ``run`` to their end; returns the exit code.

    Args:
        on_tick: called a few times per second while workers run.
        reserve: a context that holds the workers' resources (GPUs, cores); entering it may wait, and returns early when
            a stop is requested.
        entry: the worker's entry point, as "module:function".
        store: the entry point of an attempt's store.
    """
    raise_descriptor_limit()
    allocation = current_allocation()
    end = JobEnd.of_this_process(run)
    with nonfailing_streams(), watch_signals() as stop:
        try:
            refuse_few_descriptors()
            if end is not None:
                with suppress(OSError):  # the batch script also removes it
                    end.begin()
            with _sole_agent(run, allocation, stop), reserve(stop) if reserve else nullcontext():
                return _run(run, allocation, end, stop, on_tick or _no_op, entry, store)
        except (UserError, OSError) as error:
            refusal = error if isinstance(error, UserError) else out_of_descriptors(error)
            if refusal is None:
                raise
            print(refusal, file=sys.stderr)
            if end is not None and allocation.node_rank == 0:  # only node 0 records the job's end
                end.record(Exit.REFUSED)
            return Exit.REFUSED


def _preload(config: Config, entry: str, store: str) -> list[str]:
    """Returns the modules that the warm parent imports: all that are slow to import and needed by this run."""
    modules = [each.partition(":")[0] for each in (entry, store)]
    pipeline = [] if config.strategy.pp == 1 else ["hpc_train.parallel.pipeline_engine"]
    return ["hpc_train.elastic.warm_parent", "hpc_train.elastic.worker_process", *dict.fromkeys(modules), *pipeline]


@contextmanager
def _sole_agent(run: RunDirectory, allocation: Allocation, stop: StopRequests) -> Iterator[None]:
    if allocation.node_rank > 0:
        yield
        return
    with hold_lease(run, on_loss=lambda: stop.request("lease lost"), give_up=lambda: stop.requested):
        yield


def _run(
    run: RunDirectory,
    allocation: Allocation,
    end: JobEnd | None,
    stop: StopRequests,
    on_tick: Callable[[], None],
    entry: str,
    store: str,
) -> int:
    config = load(run)
    allocation = _on_the_network(config, allocation)
    use_frozen_code(frozen_code(run))
    if config.run.group is not None:
        write_for_group()
    node = _this_node(config, allocation)
    events = EventLog.open(run, f"agent-{allocation.node_name}", 0)
    output = FileWriter("the output of the workers")
    with (
        closing(events),
        closing(output),
        node_local_caches(f"{allocation.launch_id}-{allocation.node_name}") as caches,
    ):
        users = dict(os.environ)
        own = _set_environment(config, allocation, node, caches)
        start_warm_parent(_preload(config, entry, store))
        server = stores = None
        if allocation.node_rank == 0:
            stores = Stores(store)
            attempts = Attempts(run, config, allocation, end, stores, Fabric(run, config, own), events)
            server, address = _start_server(run, config, allocation, attempts)
        else:
            try:
                found = wait_for_server(
                    run, allocation, lambda: stop.requested, lambda: _has_ended(end), config.elastic.join_timeout_s
                )
            except ServerLost as lost:
                return requeue_after_server_loss(run, config, allocation, end, lost)
            if found is None:
                return Exit.STOPPED
            address = found
        # runs while the warm parent imports
        facts = this_node(allocation.node_name, _server_host(allocation, address), users)
        node = replace(node, facts=facts if node.gpus else replace(facts, visible=()))
        watch = Watch.of(run, allocation.node_name, config)
        budget = Budget(run, config.run.max_gpu_hours, allocation.nodes * node.gpus)
        gpu_errors = GpuErrors(node.facts, node.workers)
        stacks = StacksRequests.of(run) if allocation.node_rank == 0 else None
        agent = Agent(
            run=run,
            config=config,
            allocation=allocation,
            node=node,
            server=address,
            stores=stores,
            stop=stop,
            watch=watch,
            gpu_errors=gpu_errors,
            budget=budget,
            on_tick=on_tick,
            entry=entry,
            events=events,
            output=output,
            deletion=DeletionWatch(run),
            stacks=stacks,
        )
        try:
            return agent.work()
        except ServerLost as lost:
            return requeue_after_server_loss(run, config, allocation, end, lost)
        finally:
            if stores is not None:
                stores.stop()
            if server is not None:
                server.join()


def _on_the_network(config: Config, allocation: Allocation) -> Allocation:
    """Returns ``allocation`` with the address at which the nodes meet."""
    interface = config.cluster.interface
    allocation = meeting_at(allocation, interface)
    if allocation.node_rank > 0:
        return allocation
    allocation, doubt = listening_at(allocation, is_chosen=interface is not None)
    if doubt is not None:
        fix = "set cluster.interface to the interface of the job"
        print(f"{allocation.node_name} listens on all interfaces: {doubt}; {fix}", file=sys.stderr, flush=True)
    return allocation


def _this_node(config: Config, allocation: Allocation) -> Node:
    """Describes this node, or why it cannot take part; the server gets both in the same message."""
    gpus = workers = 0
    unfit = refusal = None
    try:
        gpus, workers = workers_per_node(config.cluster)
        unfit = check_health(config.cluster)
    except UnusableGpus as error:
        unfit = Unfit(error.reason, error.fix)
    except UserError as error:
        refusal = str(error)
    number, name, address = allocation.node_rank, allocation.node_name, allocation.address
    # nvidia-smi takes up to seconds, and only the choice of pipeline ranks on several nodes needs the memory
    memory = gpu_memory(None) if gpus and allocation.nodes > 1 and config.strategy.pp == "auto" else None
    return Node(number, name, address, switch_address(), gpus, workers, unfit=unfit, refusal=refusal, gpu_memory=memory)


def _server_host(allocation: Allocation, server: ServerAddress) -> str | None:
    if allocation.nodes == 1:
        return None
    return allocation.address if allocation.node_rank == 0 else server.host


def _set_environment(
    config: Config, allocation: Allocation, node: Node, caches: Iterable[Variable]
) -> list[dict[str, str]]:
    """Sets what the warm parent, and so all workers, inherit; returns it with reasons."""
    workers = node.workers
    if allocation.nodes == 1 and workers:
        workers = min(workers, resolve_layout(config, 1, workers).world_size)
    threads = threads_per_rank(config.train.threads, max(1, workers))
    return apply([*own_environment(threads), *caches])


def _start_server(
    run: RunDirectory, config: Config, allocation: Allocation, attempts: Attempts
) -> tuple[RendezvousServer, ServerAddress]:
    elastic = config.elastic
    listener = bind(allocation, f"{allocation.launch_id}:server")
    address = ServerAddress(allocation.address, listener.getsockname()[1], secrets.token_hex(16))
    newest = CheckpointStore(run.checkpoints).newest()
    coordinator = Coordinator(
        config,
        expected=allocation.nodes,
        history=History(
            furthest=0 if newest is None else newest.step, attempts=0 if attempts.end is None else attempts.end.restart
        ),
        node_failures=NodeFailures(run, elastic.exclude_hours * 3600),
        join_until=time.monotonic() + elastic.join_timeout_s,
        refusal=lambda: _read(lambda: attempts.superseded() or over_budget(run, config), None),
        superseded=lambda: attempts.superseded() or attempts.replaced_by_slurm(),
        names=allocation.node_names,
        elsewhere=attempts.end is not None,
    )
    suspended = None if attempts.end is None else is_suspended
    server = RendezvousServer(
        coordinator, listener, address.token, elastic.heartbeat_timeout_s, attempts.begin, attempts.leave, suspended
    )
    server.start()
    if allocation.nodes > 1:
        address.publish(run, allocation.launch_id)
    return server, replace(address, host=allocation.listen_address or LOOPBACK)


def _has_ended(end: JobEnd | None) -> bool:
    """Returns whether the agent of node 0 ended before it had a rendezvous server."""
    return end is not None and _read(end.is_recorded, False)


def write_pause(pause: Pause, events: EventLog, in_job: bool) -> None:
    """Writes an event about a time in which the batch host did not execute; asks Slurm whether it suspended the job."""
    by_slurm = in_job and was_suspended(pause.until - pause.seconds)
    reason = "Slurm suspended the job" if by_slurm else "the processes of the batch host did not execute"
    event, seconds = "suspended" if by_slurm else "paused", round(pause.seconds, 3)
    events.write(event, seconds=seconds, until=pause.until, reason=f"{reason} for {seconds:.0f} s")


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
    entry: str
    events: EventLog  # of this agent, in any attempt
    output: FileWriter  # of the logs of its workers
    deletion: DeletionWatch
    stacks: StacksRequests | None = None  # only in the agent with the server
    _attempt: int | None = field(default=None, init=False)  # the newest attempt it knows of
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
        if self.stores is not None and self.budget.is_used_up:
            self.stop.request(OVER_BUDGET)
        while self.stores is not None and not client.pauses.empty():  # the other nodes stopped with this one
            self._report_pause(client.pauses.get())
        if self.stop.reason is not None and client.send_stop(self.stop.reason) and not self._replaced:
            self._events().write("stop_requested", reason=self.stop.reason)

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
        attempt = _read(self.run.newest_attempt, 0) if self._attempt is None else self._attempt
        return self.events.of(max(0, attempt))

    def _check_store(self, client: RendezvousClient, attempt: int) -> None:
        if self.stores is not None and self.stores.lost:
            self.stores.stop()
            client.send_store_lost(attempt)

    def _take_part(self, client: RendezvousClient, spec: AttemptSpec) -> None:
        """Runs this node's workers in one attempt, unless it is a spare."""
        self._attempt = spec.attempt
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
            if client.is_to_end(spec.attempt):
                if client.hung:
                    self.watch.keep_stacks()
                raise EndedByServer

        self.watch.begin(self.events.of(spec.attempt), spec.layout, self._patience_s(spec))
        nodes = self.allocation.nodes
        grace_s = _read(lambda: stop_time(self.config, self.run, nodes).seconds, float(UNKNOWN_S))
        specs = self._specs(spec, grace_s)
        try:
            self.gpu_errors.wait_for_memory(self.events.of(spec.attempt), tick, self.stop)
            log = WorkerLog(self.run.logs / f"{self.allocation.node_name}-{spec.attempt:03d}.log", self.output)
            began = time.monotonic()
            outcome = run_attempt(specs, log, self.stop, grace_s, tick, self.entry, self.watch)
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

    def _furthest_step(self, attempt: int) -> int:
        newest = _read(CheckpointStore(self.run.checkpoints).newest, None)
        last: dict[str, Any] = _read(lambda: last_line(self.run.metrics_file(attempt)), {})
        return max(last.get("step", 0), 0 if newest is None else newest.step)

    def _specs(self, spec: AttemptSpec, stop_grace_s: float) -> list[WorkerSpec]:
        local_workers = min(spec.workers_per_node, spec.layout.world_size)
        position = spec.order.index(self.node.number)
        bound = bindings(self.node.facts, local_workers)
        visible = devices(self.node.facts)
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
                **_device_and_environment(local_rank, visible, spec.environment, self.config.cluster.visible_gpus),
                cpus=bound[local_rank].cpus,
                stop_grace_s=stop_grace_s,
                checked=spec.checked,
            )
            for local_rank in range(local_workers)
        ]


def _read(operation: Callable[[], Result], default: Result) -> Result:
    """Returns the result of ``operation``; ``default`` if the file system fails for too long or does not respond."""
    try:
        return in_time(operation)
    except OSError:
        return default


def _device_and_environment(
    local_rank: int, visible: Sequence[Device], environment: Mapping[str, str], visible_gpus: str
) -> dict[str, Any]:
    """Returns the rank's device and its own variables. The user's settings take precedence.

    Args:
        visible: the devices that the agent sees, in the order of local rank.
        visible_gpus: ``cluster.visible_gpus``. CUDA shows a process only one MIG slice in any case.
    """
    own = {name: value for name, value in environment.items() if name not in os.environ}
    device = visible[local_rank] if local_rank < len(visible) else None
    if device is not None and (device.is_slice or (visible_gpus == "own" and device.is_nvidia)):
        return {"cuda_device": 0, "environment": own | {"CUDA_VISIBLE_DEVICES": device.name}}
    return {"cuda_device": local_rank, "environment": own}


def _no_op() -> None:
    pass
