"""Runs an agent while its warm parent imports: opens or finds the rendezvous server, and works through the attempts.

``hpc_train.elastic.agent`` imports this module after it has started the warm parent, so that both import at the same
time.
"""

from __future__ import annotations

import math
import re
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, replace

from hpc_train.checkpoint.space import stop_time
from hpc_train.checkpoint.store import CheckpointStore
from hpc_train.config.schema import Config
from hpc_train.config.values import runs_command
from hpc_train.elastic.agent_loop import Agent, DeletionWatch
from hpc_train.elastic.attempts import Attempts
from hpc_train.elastic.decision import Budget, History, over_budget
from hpc_train.elastic.fabric import Fabric
from hpc_train.elastic.gpu_errors import GpuErrors, IdleGpus
from hpc_train.elastic.nodes import Node, NodeFailures, check_health
from hpc_train.elastic.priority import PriorityWatch
from hpc_train.elastic.rendezvous.addresses import ServerAddress, bind
from hpc_train.elastic.rendezvous.client import ServerLost, requeue_after_server_loss, wait_for_server
from hpc_train.elastic.rendezvous.coordinator import Coordinator
from hpc_train.elastic.rendezvous.messages import Leave
from hpc_train.elastic.rendezvous.server import RendezvousServer
from hpc_train.elastic.rendezvous.store import Stores
from hpc_train.elastic.requeue import JobEnd, request
from hpc_train.elastic.resize import Growth
from hpc_train.elastic.script import FolderLooks, Script
from hpc_train.elastic.watch import Watch
from hpc_train.elastic.worker_process import die_with_warm_parent, ensure_warm_parent, fork_process
from hpc_train.errors import UserError
from hpc_train.machine.allocation import LOOPBACK, Allocation
from hpc_train.machine.gpus import gpu_memory
from hpc_train.machine.network.node import this_node
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog, age_of_this_process
from hpc_train.run.exits import Action, Exit
from hpc_train.run.file_writer import FileWriter
from hpc_train.run.files import read_or
from hpc_train.run.ledger import Account, read_ledger
from hpc_train.run.requests import NewRequests, StopRequests, hold_requested, resize_requested, stacks_requested
from hpc_train.schedulers.current import current_job
from hpc_train.telemetry.sinks.tracking import TrackingProcess, tracked

JOIN_S = 20.0  # until a joiner's node finds the server, whose address was published before the joiner was submitted


@dataclass(frozen=True)
class Session:
    """Holds what an agent has prepared for the attempts of its run.

    Attributes:
        end: where the end of the job is recorded; None outside a job that can be requeued.
        users: the environment before hpc_train has changed it.
        local_variables: the variables that hpc_train has set for all workers, with reasons.
        entry: the entry point of the workers, or the command of the run.
        store: the entry point of an attempt's store.
        on_tick: called a few times per second while workers run.
        is_guest: whether the node belongs to a joiner job.
    """

    run: RunDirectory
    config: Config
    allocation: Allocation
    node: Node
    end: JobEnd | None
    stop: StopRequests
    events: EventLog
    output: FileWriter
    echo: FileWriter | None
    users: dict[str, str]
    local_variables: list[dict[str, str]]
    entry: str | Script
    store: str
    on_tick: Callable[[], None]
    is_guest: bool = False

    def work(self) -> int:
        """Runs the attempts to their end; returns the exit code."""
        leads = self.allocation.node_rank == 0 and not isinstance(self.entry, Script)
        try:
            with tracked(self.run, self.config) if leads else nullcontext() as tracking:
                return self._work(tracking)
        finally:
            if self.end is not None and self.allocation.node_rank == 0:
                self.end.job.note(_summary(self.run, self.events.now()), SUMMARY)

    def _work(self, tracking: TrackingProcess | None) -> int:
        run = self.run
        config = self.config
        allocation = self.allocation
        end = self.end
        server = stores = coordinator = agent = None
        address: ServerAddress | None
        try:
            if end is not None and self._follows_lost_agent(end):
                if end.asks_for_requeue():
                    return Exit.STOPPED
                return request(end, config, self.events.of(max(0, run.newest_attempt())), "the batch host was lost")
            if allocation.node_rank == 0:
                stores = Stores(None if isinstance(self.entry, Script) else self.store)
                attempts = Attempts(
                    run, config, allocation, end, stores, Fabric(run, config, self.local_variables), self.events
                )
                coordinator = head = _coordinator(run, config, allocation, attempts)
                attempts.joined = lambda: list(head.present)
                coordinator.stop = self.stop.reason  # requested before any attempt: none starts
                server, address = _start_server(run, config, allocation, attempts, coordinator, tracking)
            else:
                if self.is_guest and isinstance(self.entry, str):
                    # the run must not stop for this node before the imports of its warm parent are done
                    with suppress(EOFError, ConnectionError):
                        fork_process(die_with_warm_parent, ensure_warm_parent()).join()
                limit_s = JOIN_S if self.is_guest else config.elastic.join_timeout_s
                address = wait_for_server(
                    run, allocation, lambda: self.stop.requested, lambda: _has_ended(end), limit_s
                )
            if address is None:
                return Exit.STOPPED
            growth = None
            if server is not None and coordinator is not None:
                growth = self._growth(server, address, attempts)
            agent = self._agent(_examined(self.node, config, allocation), address, stores, coordinator, growth)
            with closing(self._idle_gpus(agent.gpu_errors)):
                return agent.work()
        except ServerLost as lost:
            decided = None if server is None else server.code
            code = requeue_after_server_loss(run, config, allocation, end, lost, self.events, decided)
            return Exit.DONE if self.is_guest else code
        finally:
            if stores is not None:
                stores.stop()
            if server is not None:
                server.join()
            if self.is_guest and (agent is None or not agent.has_joined):
                events = self.events.of(max(0, read_or(run.newest_attempt, 0)))
                events.write("left", seconds=round(age_of_this_process(), 3), gpus=self.node.gpus)

    def _follows_lost_agent(self, end: JobEnd) -> bool:
        """Returns whether this start of the job has lost its agent of node 0, which this one replaces."""
        is_replacement = end.job.replaces_nodes and self.allocation.node_rank == 0 and self.allocation.nodes > 1
        return is_replacement and ServerAddress.find(self.run, self.allocation.launch_id) is not None

    def _idle_gpus(self, gpus: GpuErrors) -> IdleGpus:
        """Starts and returns the watch for idle GPUs of this node."""

        def report(minutes: float, names: list[str]) -> None:
            message = f"idle for {minutes:g} minutes on {self.allocation.node_name}: {', '.join(names)}"
            self.events.of(max(0, read_or(self.run.newest_attempt, 0))).write("gpu_idle", gpus=names, message=message)
            print(f"warning: {message}; the site may end jobs whose GPUs are idle", file=sys.stderr, flush=True)

        addresses = [address for address in gpus.addresses() if address is not None]
        idle_gpus = IdleGpus(addresses, 60 * self.config.telemetry.gpu_idle_minutes, report)
        idle_gpus.start()
        return idle_gpus

    def _growth(self, server: RendezvousServer, address: ServerAddress, attempts: Attempts) -> Growth:
        def host(allocation: Allocation) -> Node:
            return self._with_facts(replace(self.node, address=allocation.address), allocation.address)

        def on_network(allocation: Allocation) -> None:
            attempts.allocation = allocation

        return Growth(
            self.run,
            self.config,
            self.allocation,
            server,
            address,
            attempts.nodes,
            host,
            self.users,
            on_network,
        )

    def _with_facts(self, node: Node, server_host: str | None) -> Node:
        facts = this_node(self.allocation.node_name, server_host, self.users)
        return replace(node, facts=facts if node.gpus else replace(facts, visible=()))

    def _agent(
        self,
        node: Node,
        address: ServerAddress,
        stores: Stores | None,
        coordinator: Coordinator | None,
        growth: Growth | None,
    ) -> Agent:
        run = self.run
        config = self.config
        allocation = self.allocation
        node = self._with_facts(node, _server_host(allocation, address))
        queue = None
        if allocation.node_rank == 0 and not self.is_guest:
            queue = PriorityWatch.of(run, config, current_job())

        def tick() -> None:
            self.on_tick()
            if queue is not None:
                queue.look()

        return Agent(
            run=run,
            config=config,
            allocation=allocation,
            node=node,
            server=address,
            stores=stores,
            stop=self.stop,
            watch=Watch.of(run, allocation.node_name, config),
            gpu_errors=GpuErrors(node.facts, max(node.gpus, node.workers)),
            budget=Budget(run, config.run.max_gpu_hours, allocation.nodes * node.gpus, self.events.now),
            on_tick=tick,
            entry=self.entry,
            events=self.events,
            output=self.output,
            echo=self.echo,
            deletion=DeletionWatch(run),
            stacks=NewRequests(lambda: stacks_requested(run), stacks_requested(run))
            if allocation.node_rank == 0
            else None,
            holds=NewRequests(lambda: hold_requested(run), hold_requested(run)) if allocation.node_rank == 0 else None,
            resizes=NewRequests(lambda: resize_requested(run), None) if allocation.node_rank == 0 else None,
            looks=FolderLooks.of(config, allocation.nodes) if allocation.node_rank == 0 else None,
            stop_at=time_to_stop(run, config, self.end),
            is_guest=self.is_guest,
            growth=growth,
            present=lambda: {} if coordinator is None else dict(coordinator.present),
            accepted_stop=lambda: None if coordinator is None else coordinator.stop,
        )


def time_to_stop(run: RunDirectory, config: Config, end: JobEnd | None) -> float:
    """Returns when the job must begin to save before its time limit, in seconds since 1970; infinite if a signal
    announces the limit. Saving begins as early as it needs, and at most a third of the remaining time before the limit.
    """
    if end is None or end.job.end_time is None:
        return math.inf
    left_s = end.job.end_time - time.time()
    lead_s = stop_time(config, run, end.job.nodes() or 1).seconds
    return end.job.end_time - min(lead_s, left_s / 3)


SUMMARY = re.compile(r" ?(goodput=\S+)?( ?mfu=\S+)?( ?gpu_hours=\S+)?$")


def _summary(run: RunDirectory, now: float) -> str:
    """Returns what the job's comment, and so ``sacct``, says about the run: ``goodput=0.93 mfu=0.41 gpu_hours=12.0``.

    All jobs of the run count. The MFU is from the last logged step.
    """
    total = read_or(lambda: read_ledger(run, now).total, Account())
    mfu = read_or(lambda: run.newest_metrics(run.newest_attempt()).get("mfu"), None)
    parts = []
    if total.steps_s or run.record().get("own_code") != "command":  # a script need not report its steps
        parts = [f"goodput={total.useful_share:.2f}"]
    if mfu is not None:
        parts += [f"mfu={mfu:.2f}"]
    if total.gpu_s:
        parts += [f"gpu_hours={total.gpu_hours:.1f}"]
    return " ".join(parts)


def _examined(node: Node, config: Config, allocation: Allocation) -> Node:
    """Returns ``node`` with its memory and the result of the site's check; both may take seconds."""
    if node.unfit is not None or node.refusal is not None:
        return node
    # only the choice of pipeline ranks on several nodes needs the memory
    asks = node.gpus > 0 and allocation.nodes > 1 and config.strategy.pp == "auto"
    node = replace(node, gpu_memory=gpu_memory(None) if asks else None)
    try:
        return replace(node, unfit=check_health(config.cluster))
    except UserError as error:
        return replace(node, refusal=str(error))


def _server_host(allocation: Allocation, server: ServerAddress) -> str | None:
    if allocation.nodes == 1:
        return None
    if allocation.node_rank == 0:
        return allocation.address
    return server.host


def _coordinator(run: RunDirectory, config: Config, allocation: Allocation, attempts: Attempts) -> Coordinator:
    elastic = config.elastic
    newest = CheckpointStore(run.checkpoints).newest()
    return Coordinator(
        config,
        expected=allocation.nodes,
        history=History(
            furthest=0 if newest is None else newest.step,
            attempts=0 if attempts.end is None else attempts.end.restart,
            restarts_left=None if config.run.roles else elastic.max_restarts,
        ),
        node_failures=NodeFailures(run, elastic.exclude_hours * 3600),
        join_until=time.monotonic() + elastic.join_timeout_s,
        refusal=lambda: read_or(lambda: attempts.superseded() or over_budget(run, config, attempts.events.now()), None),
        superseded=lambda: attempts.superseded() or attempts.replaced_by_slurm(),
        taken_over=attempts.superseded
        if attempts.end is not None and attempts.end.job.replaces_nodes
        else lambda: None,
        names=allocation.node_names,
        elsewhere=attempts.end is not None,
        saved=lambda: None if runs_command(config) else read_or(lambda: _has_checkpoint(run), None),
    )


def _start_server(
    run: RunDirectory,
    config: Config,
    allocation: Allocation,
    attempts: Attempts,
    coordinator: Coordinator,
    tracking: TrackingProcess | None,
) -> tuple[RendezvousServer, ServerAddress]:
    listener = bind(allocation, f"{allocation.launch_id}:server")
    address = ServerAddress(allocation.address, listener.getsockname()[1], secrets.token_hex(16))
    suspended = None if attempts.end is None else attempts.end.job.is_suspended

    def leave(order: Leave) -> int:
        if tracking is not None:  # before anybody learns of the end, so that the trackers then have all of the run
            newest = read_or(CheckpointStore(run.checkpoints).newest, None)
            tracking.end(order.decision.action is Action.FINISH, None if newest is None else newest.path)
        return attempts.leave(order)

    server = RendezvousServer(
        coordinator, listener, address.token, config.elastic.heartbeat_timeout_s, attempts.begin, leave, suspended
    )
    server.start()
    if allocation.nodes > 1:
        address.publish(run, allocation.launch_id)
    return server, replace(address, host=allocation.listen_address or LOOPBACK)


def _has_checkpoint(run: RunDirectory) -> bool | None:
    return CheckpointStore(run.checkpoints).newest() is not None


def _has_ended(end: JobEnd | None) -> bool:
    """Returns whether the agent of node 0 ended before it had a rendezvous server."""
    return end is not None and read_or(end.is_recorded, False)
