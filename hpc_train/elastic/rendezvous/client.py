"""An agent's connection to the rendezvous server, and what agents do when the server is lost.

The connection sends heartbeats and passes on the server's orders. If the server is lost, one of the
remaining agents asks Slurm to run the job again: with ``--no-kill`` a job whose batch host is lost would otherwise stay
RUNNING without a batch script until its time limit.
"""

from __future__ import annotations

import queue
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from hpc_train.config.schema import Config
from hpc_train.elastic.nodes import TOO_OFTEN, Node, NodeFailures
from hpc_train.elastic.rendezvous.addresses import ServerAddress
from hpc_train.elastic.rendezvous.channel import Channel, Message
from hpc_train.elastic.rendezvous.messages import NodeReport, hello, report_message
from hpc_train.elastic.rendezvous.server import beat_s, has_stalled
from hpc_train.elastic.requeue import JobEnd, request
from hpc_train.machine.allocation import Allocation
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.exits import Exit, Failure
from hpc_train.run.files import in_time
from hpc_train.run.requests import HoldRequest, ResizeRequest
from hpc_train.schedulers.scheduler import CurrentJob

# A dying server closes its connections, unless its node is cut off. It may be busy with a slow file system and asks
# Slurm before it declares a silent node lost, so its timeout is longer than a node's.
SERVER_BUSY_S = 15.0  # on top of elastic.heartbeat_timeout_s
CONNECT_S = 5.0
RETRY_S = 0.2


class ServerLost(ConnectionError):
    """Raised when the rendezvous server is gone: its node or its agent.

    Args:
        frozen: its connection lived, or its agent never started, so that its node must be avoided.
    """

    def __init__(self, message: str, frozen: bool = False) -> None:
        super().__init__(message)
        self.frozen = frozen


@dataclass(frozen=True)
class Pause:
    """A time in which this process did not execute: its seconds, and its end in seconds since 1970."""

    seconds: float
    until: float


class RendezvousClient:
    """Communicates with the server; ``connect`` creates it.

    A thread reads messages and sends heartbeats, even while the agent is busy.
    """

    def __init__(self, channel: Channel, heartbeat_timeout_s: float, nodes: int) -> None:
        self._channel = channel
        self._nodes = nodes
        self._silent_node_s = heartbeat_timeout_s
        self._orders: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._ended = -1  # the newest attempt that the server has ended
        self._stop_sent = False
        self._to_stop = -1  # the newest attempt whose workers are to stop after a checkpoint
        self.pauses: queue.SimpleQueue[Pause] = queue.SimpleQueue()
        self.lost = False
        self.silent = False  # lost without a closed connection: its agent is frozen or its node is cut off
        self._to_save = self._saved = -1  # the newest attempt whose stacks all nodes are to save, and have saved
        self.stacks_requested = 0  # number of the newest request for stacks that node 0 has found
        self.hold_requested: HoldRequest | None = None  # the newest request to hold a rank that node 0 has found
        self._without: tuple[int, frozenset[int]] = (-1, frozenset())  # an attempt and its lost replicas
        self.losses: queue.SimpleQueue[dict[str, Any]] = (
            queue.SimpleQueue()
        )  # details of each event about lost replicas
        self.progress = 0  # newest change in run.progress_dir that node 0 has found, in nanoseconds since 1970
        threading.Thread(target=self._follow, name="rendezvous-client", daemon=True).start()

    @classmethod
    def connect(
        cls,
        server: ServerAddress,
        node: Node,
        heartbeat_timeout_s: float,
        patience_s: float = CONNECT_S,
        nodes: int = 1,
    ) -> RendezvousClient:
        """Joins the server of a job of ``nodes`` nodes as ``node``.

        Raises:
            ServerLost: the server does not respond within ``patience_s``.
        """
        until = time.monotonic() + patience_s
        while True:
            try:
                connection = socket.create_connection((server.host, server.port), timeout=CONNECT_S)
                connection.sendall(server.token.encode())  # must come first: see channel.Admission
                channel = Channel(connection)
                break
            except OSError as error:
                if time.monotonic() > until:
                    raise ServerLost(
                        f"the rendezvous server at {server.host}:{server.port} does not respond: {error}"
                    ) from error
                time.sleep(RETRY_S)
        channel.send(hello(node))
        return cls(channel, heartbeat_timeout_s, nodes)

    def order(self, timeout: float) -> Message | None:
        """Returns the next order (start or leave); None if none arrives within ``timeout`` seconds.

        Raises:
            ServerLost: the server is gone and no order is left.
        """
        try:
            return self._orders.get(timeout=timeout)
        except queue.Empty:
            if self.lost:
                silent = f"the rendezvous server was silent for {self._silent_node_s + SERVER_BUSY_S:g} s"
                raise ServerLost(silent if self.silent else "the rendezvous server is gone", self.silent) from None
            return None

    def is_to_end(self, attempt: int) -> bool:
        """Returns whether the workers of ``attempt`` must be killed."""
        return self.lost or self._ended >= attempt

    def must_stop(self, attempt: int) -> bool:
        """Returns whether the workers of ``attempt`` must stop after a checkpoint, since the nodes change."""
        return self._to_stop >= attempt

    def lost_replicas(self, attempt: int | None) -> frozenset[int]:
        """Returns the replicas without which ``attempt`` goes on (``strategy.local_steps``)."""
        of_attempt, lost = self._without
        return lost if of_attempt == attempt else frozenset()

    def must_save_stacks(self, attempt: int) -> bool:
        """Returns whether ranks of ``attempt`` hang on some node, so that each node saves the stacks of its ranks."""
        return self._to_save >= attempt

    def have_all_saved(self, attempt: int) -> bool:
        """Returns whether all nodes have saved the stacks of their ranks, or the workers must be killed anyway."""
        return self._saved >= attempt or self.is_to_end(attempt)

    def send_stop(self, reason: str) -> None:
        """Reports a stop request to the server, once."""
        if not self._stop_sent:
            self._stop_sent = True
            self._channel.send({"kind": "stop", "reason": reason})

    def quit(self, message: str) -> None:
        """Reports that a user killed the workers of this node without waiting."""
        self._channel.send({"kind": "quit", "message": message})

    def send_resize(self, request: ResizeRequest) -> None:
        """Reports a request to resize the run, which this agent has accepted."""
        self._channel.send({"kind": "resize", **asdict(request)})

    def send_invitation(self, first: int, count: int, host: Node) -> None:
        """Tells the server the numbers of the nodes of a joiner job, and how they reach this node."""
        self._channel.send({"kind": "invite", "first": first, "count": count, "node": host.to_json()})

    def send_retirement(self) -> None:
        """Reports that the joiner job of this node ends."""
        if not self._stop_sent:
            self._stop_sent = True
            self._channel.send({"kind": "retire"})

    def send_stacks_request(self, number: int) -> None:
        """Reports a request for stacks, which the server passes on to all agents."""
        self._channel.send({"kind": "stacks", "number": number})

    def send_hold_request(self, request: HoldRequest) -> None:
        """Reports a request to hold a rank, which the server passes on to all agents."""
        self._channel.send({"kind": "hold", **asdict(request)})

    def send_progress(self, changed: int) -> None:
        """Reports a change in ``run.progress_dir``, which the server passes on to all agents."""
        self._channel.send({"kind": "progress", "number": changed})

    def send_store_lost(self, attempt: int) -> None:
        self._channel.send({"kind": "store_lost", "attempt": attempt})

    def send_stacks_saved(self, attempt: int) -> None:
        """Reports that this node has saved the stacks of its ranks; the server then asks the other nodes for theirs."""
        self._channel.send({"kind": "stacks_saved", "attempt": attempt})

    def send_attempt_end(self, attempt: int, report: NodeReport) -> None:
        self._channel.send(report_message(attempt, report))

    def leave(self, seconds: float) -> None:
        """Sends ``bye`` and waits until the server releases all agents."""
        self._channel.send({"kind": "bye"})
        until = time.monotonic() + seconds
        while not self.lost and time.monotonic() < until:
            time.sleep(0.02)
        self._channel.close()

    def _follow(self) -> None:
        heard = looked = time.monotonic()
        next_beat = 0.0
        try:
            while not self.silent:
                now = time.monotonic()
                # e.g. a suspended job: the server stalled too
                if has_stalled(now - looked, self._silent_node_s, self._nodes):
                    heard = now
                    self.pauses.put(Pause(now - looked, time.time()))
                looked = now
                if now >= next_beat:
                    next_beat = now + beat_s(self._silent_node_s, self._nodes)
                    self._channel.send({"kind": "beat"})
                if self._channel.wait(max(0.0, next_beat - now)):
                    for message in self._channel.read():
                        self._handle(message)
                    heard = time.monotonic()
                self.silent = now - heard > self._silent_node_s + SERVER_BUSY_S
        except (ConnectionError, OSError, ValueError):
            pass
        finally:
            self.lost = True
            self._channel.close()

    def _handle(self, message: Message) -> None:
        if message["kind"] == "end":
            self._ended = message["attempt"]
        elif message["kind"] == "go_on":
            self._without = message["attempt"], frozenset(message["lost"])
            self.losses.put(message["event"])
        elif message["kind"] == "stop_workers":
            self._to_stop = message["attempt"]
        elif message["kind"] in ("start", "leave"):
            self._orders.put(message)
        elif message["kind"] == "stacks":
            self.stacks_requested = message["number"]
        elif message["kind"] == "hold":
            self.hold_requested = HoldRequest(message["rank"], message["limit_s"], message["time"])
        elif message["kind"] == "progress":
            self.progress = message["number"]
        elif message["kind"] == "save_stacks":
            self._to_save = message["attempt"]
            self._saved = message["attempt"] if message["done"] else self._saved
        elif message["kind"] == "dropped":
            print(f"the rendezvous server dropped this node: {message['why']}", file=sys.stderr, flush=True)


LOOKUPS_PER_S = 200  # lookups of the server's address, by all agents of a job together
MOST_LOOKUP_S = 10.0


def lookup_interval_s(nodes: int) -> float:
    """Returns the mean time between two looks of an agent for the server's address. All nodes look into one directory
    of a shared file system, so each looks less often in a large job.
    """
    return min(max(RETRY_S, nodes / LOOKUPS_PER_S), MOST_LOOKUP_S)


def wait_for_server(
    run: RunDirectory,
    allocation: Allocation,
    stop_requested: Callable[[], bool],
    has_ended: Callable[[], bool],
    timeout: float,
) -> ServerAddress | None:
    """Returns the address of a launch's server; None if a stop is requested or the agent of node 0 has ended first.

    Args:
        stop_requested: called several times per second.
        has_ended: called as often as the address is looked up, since it may read the run directory as well.

    Raises:
        ServerLost: no address was published within ``timeout`` seconds.
    """
    interval_s = lookup_interval_s(allocation.nodes)
    next_look = 0.0
    until = time.monotonic() + timeout
    while not stop_requested():
        now = time.monotonic()
        if now >= next_look:
            next_look = now + interval_s * random.uniform(0.5, 1.5)
            address = None
            with suppress(OSError):  # it may be readable later
                address = ServerAddress.find(run, allocation.launch_id)
            if address is not None or has_ended():
                return address
        if now > until:
            message = f"the agent of node 0 published no rendezvous address within {timeout:.0f} s"
            raise ServerLost(message, frozen=True)
        time.sleep(RETRY_S)
    return None


ASK_AGAIN_S = 5.0
REFUSALS = 3
PATIENCE_S = 600.0  # how long a Slurm controller may be unavailable


def requeue_after_server_loss(
    run: RunDirectory,
    config: Config,
    allocation: Allocation,
    end: JobEnd | None,
    lost: ServerLost,
    log: EventLog,
    decided: int | None = None,
) -> Exit:
    """Requeues or ends the job after its workers are dead; every remaining agent calls it. Returns the exit code.

    Args:
        decided: the exit code if the server of this process has ended the job, for example because of a stop request
            before its agent joined.
    """
    if decided is not None:
        return Exit(decided)
    if end is None:  # the job does not own the run
        print(f"{allocation.node_name} leaves the run: {lost}", file=sys.stderr, flush=True)
        return Exit.STOPPED
    if _is_decided(end, lost):
        return Exit.STOPPED
    # Slurm ends this job's tasks when it requeues the job, and the commands below must survive that
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    attempt = 0
    with suppress(OSError):
        attempt = in_time(run.newest_attempt)
    events = log.of(max(0, attempt))
    host = allocation.node_names[0]
    details: dict[str, Any] = {"class": Failure.NODE_LOST, "message": str(lost), "rank": None, "node": host}
    events.write("node_lost", **details)
    code = Exit.STOPPED
    try:
        times = TOO_OFTEN if lost.frozen else 1
        NodeFailures(run, config.elastic.exclude_hours * 3600).note(host, Failure.NODE_LOST, times)
        code = in_time(lambda: request(end, config, events, "the batch host is lost"))
    except OSError as error:  # no other agent asks Slurm, and the job would keep running without workers
        print(f"cannot record why the job is requeued: {error}", file=sys.stderr)
    events.close()
    job = end.job
    if not job.agents_ask:  # the batch script, which asks otherwise, is lost with its node
        command = job.requeue_command(config.launch.chain > 1)  # the job has no agents from now on
        if code is not Exit.STOPPED:
            command = job.cancel_command()
        _ask(job, command)
        if code is Exit.STOPPED and end.exclude_file.exists():
            job.exclude(end.excluded())
    with suppress(OSError):
        in_time(lambda: end.record(code))  # last, because the batch script kills the step soon after that
    return code


def _is_decided(end: JobEnd, lost: ServerLost) -> bool:
    """Returns whether another agent has decided how the job ends; False if the file system does not respond."""
    try:
        if in_time(end.is_recorded):  # node 0 has decided and considers this node lost
            return True
        print(f"{lost}; requesting a requeue of the job", file=sys.stderr)
        return not in_time(end.claim_succession)
    except OSError as error:
        print(f"{lost}; requesting a requeue of the job without the run directory: {error}", file=sys.stderr)
        return False


def _ask(job: CurrentJob, command: Sequence[str]) -> None:
    """Runs ``command`` until the scheduler accepts it, unless the job is being cancelled, is held, or is requeued.

    After ``REFUSALS`` refusals the job is cancelled instead.
    """
    until = time.monotonic() + PATIENCE_S
    refused = 0
    while time.monotonic() < until:
        is_running = job.is_running()
        if is_running is False:
            return
        if is_running:
            if job.ask(command if refused < REFUSALS else job.cancel_command()):
                return
            refused += 1
        time.sleep(ASK_AGAIN_S)
    print(f"{job.scheduler} does not respond; run this by hand: {' '.join(command)}", file=sys.stderr)
