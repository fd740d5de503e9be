"""Nodes without hardware: their facts, and agents that speak the real protocol from a few processes.

The facts are those of an HGX H100 node as ``/sys`` shows them, equal on all nodes but for names, GPU UUIDs and the
counters of links; a few nodes are odd. An agent is one connection: it connects with all others at once, introduces its
node, sends heartbeats, and reports its workers as killed when the server ends the attempt. It has no workers.
"""

from __future__ import annotations

import errno
import json
import random
import select
import selectors
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any
from uuid import UUID

from hpc_train.elastic.nodes import Node
from hpc_train.elastic.rendezvous.addresses import ServerAddress
from hpc_train.elastic.rendezvous.channel import Channel
from hpc_train.elastic.rendezvous.messages import NodeReport, report_message
from hpc_train.machine.network.discovery import read_tree, recorded_tree
from hpc_train.machine.network.facts import NodeFacts, NodeLimits, Setting
from hpc_train.run.exits import Exit
from tests.machine.network.machines import hgx

GPUS = 8
ODD_EVERY = 250  # one node in this many is odd
RETRY_S = 0.2
TURN_S = 0.01
CONNECTS = 64  # in a row, before those that are connected send their heartbeats
HELLO_S = 30.0
VERSIONS = (("cuda", "12.8"), ("driver", "570.86.15"), ("kernel", "5.15.0-1074"), ("nccl", "2.27.5"), ("torch", "2.13"))
ENVIRONMENT = ("NCCL_DEBUG_SUBSYS", "OMP_NUM_THREADS", "FI_LOG_LEVEL", "UCX_TLS")


@cache
def hgx_facts() -> NodeFacts:
    """Returns the facts of one such node as its agent reads them."""
    with tempfile.TemporaryDirectory() as folder:
        hgx(Path(folder))
        facts = read_tree(*recorded_tree(Path(folder)))
    return replace(
        facts, node="n0", visible=tuple(map(str, range(GPUS))), allowed=tuple(range(192)), allocated_cpus=192,
        route="eno1", automatic="eno1", versions=VERSIONS, limits=NodeLimits(-1, 65536, 1 << 20, 1 << 39),
        settings=tuple(Setting(name, "1", "the environment") for name in ENVIRONMENT), gpu_direct="DMA-BUF",
    )  # fmt: skip


def simulated(count: int) -> list[Node]:
    """Returns ``count`` nodes in racks of 16, the same for the same count."""
    base, chance = hgx_facts(), random.Random(0)
    return [
        Node(number, f"node{number:05d}", "127.0.0.1", None, GPUS, GPUS, _facts_of(base, number, chance))
        for number in range(count)
    ]


def _facts_of(base: NodeFacts, number: int, chance: random.Random) -> NodeFacts:
    gpus = tuple(replace(gpu, uuid=f"GPU-{UUID(int=chance.getrandbits(128))}") for gpu in base.gpus)
    nics = tuple(
        replace(nic, ports=tuple(replace(port, link_downed=chance.choice((0, 0, 0, 1, 3))) for port in nic.ports))
        for nic in base.nics
    )
    facts = replace(base, node=f"node{number:05d}", gpus=gpus, nics=nics)
    return _odd(facts, number // ODD_EVERY) if number % ODD_EVERY == ODD_EVERY - 1 else facts


def _odd(facts: NodeFacts, which: int) -> NodeFacts:
    """Returns a node with a port that is down, a slow port, another driver, or a GPU with a problem."""
    first, *others = facts.nics
    changes = (
        {"nics": (replace(first, ports=(replace(first.ports[0], state="DOWN", physical_state="POLLING"),)), *others)},
        {"nics": (replace(first, ports=(replace(first.ports[0], rate_gbps=200.0, link_downed=40),)), *others)},
        {"versions": (("cuda", "12.8"), ("driver", "565.57.01"), *facts.versions[2:])},
        {"gpus": (replace(facts.gpus[0], problems=("its PCIe link has 8 of 16 lanes",)), *facts.gpus[1:])},
    )
    return replace(facts, **changes[which % len(changes)])  # type: ignore[arg-type]


@dataclass
class SimulatedAgent:
    """One connection; ``beating`` is False for a node that is frozen."""

    hello: bytes
    channel: Channel | None = None
    next_beat: float = 0.0
    beating: bool = True
    attempt: int = -1


@dataclass
class Crowd:
    """The agents of one process, led through ``orders``: (what, argument) from the benchmark.

    ``seen`` has for each kind of message the number of agents that have received it, and when the first and the last
    did, on the monotonic clock, which all processes of this machine share.
    """

    server: ServerAddress
    agents: dict[int, SimulatedAgent]
    beat_s: float
    orders: Connection
    seen: dict[str, list[float]] = field(default_factory=dict)
    retries: int = 0
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _again: list[tuple[float, SimulatedAgent]] = field(default_factory=list)

    def run(self) -> None:
        while True:
            if self.orders.poll() and not self._obey(*self.orders.recv()):
                return
            for key, _ in self._selector.select(TURN_S):
                key.data()
            self._beat(time.monotonic())

    def _obey(self, what: str, argument: Any) -> bool:
        agent = self.agents.get(argument) if isinstance(argument, int) else None
        if what == "connect":
            self._again += [(0.0, each) for each in self.agents.values()]
        elif what == "close" and agent is not None:
            self._drop(agent)
        elif what == "freeze" and agent is not None:
            agent.beating = False
        elif what == "report":
            for each in self._connected():
                self._send(each, report_message(each.attempt, NodeReport(Exit.DONE, None, 9)))
        elif what == "seen":
            self.orders.send((self.seen.pop(argument, []), self.retries))
        elif what == "leave":
            for each in self._connected():
                self._send(each, {"kind": "bye"})
        return what != "end"

    def _connected(self) -> list[SimulatedAgent]:
        return [agent for agent in self.agents.values() if agent.channel is not None]

    def _connect(self, agent: SimulatedAgent) -> None:
        connection = socket.socket()
        connection.setblocking(False)
        if connection.connect_ex((self.server.host, self.server.port)) not in (0, errno.EINPROGRESS):
            self._retry(agent, connection)
        elif _is_writable(connection):  # the usual case on loopback
            self._greet(agent, connection)
        else:
            self._selector.register(connection, selectors.EVENT_WRITE, lambda: self._greet_late(agent, connection))

    def _greet_late(self, agent: SimulatedAgent, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._greet(agent, connection)

    def _retry(self, agent: SimulatedAgent, connection: socket.socket) -> None:
        connection.close()
        self.retries += 1
        self._again.append((time.monotonic() + RETRY_S, agent))

    def _greet(self, agent: SimulatedAgent, connection: socket.socket) -> None:
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0:
            self._retry(agent, connection)
            return
        connection.settimeout(HELLO_S)
        with suppress(OSError):  # reading finds that the server has closed the connection
            connection.sendall(self.server.token.encode() + agent.hello)
        agent.channel, agent.next_beat = Channel(connection), time.monotonic() + self.beat_s
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(agent))

    def _read(self, agent: SimulatedAgent) -> None:
        assert agent.channel is not None
        try:
            for message in agent.channel.read():
                self._handle(agent, message)
        except ConnectionError:
            self._drop(agent)
            if agent.attempt < 0:  # a real agent connects again, too
                self.retries += 1
                self._connect(agent)

    def _handle(self, agent: SimulatedAgent, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if not agent.beating:
            return
        if kind != "beat":
            self.seen.setdefault(kind, []).append(time.monotonic())
        if kind == "start":
            agent.attempt = message["spec"]["attempt"]
        elif kind == "end":
            self._send(agent, report_message(agent.attempt, NodeReport(Exit.FAILED, None, 9)))

    def _drop(self, agent: SimulatedAgent) -> None:
        if agent.channel is not None:
            self._selector.unregister(agent.channel)
            agent.channel.close()
            agent.channel = None

    def _send(self, agent: SimulatedAgent, message: dict[str, Any]) -> None:
        if agent.channel is not None:
            agent.channel.send(message)

    def _beat(self, now: float) -> None:
        for agent in self.agents.values():
            if agent.channel is not None and agent.beating and now >= agent.next_beat:
                agent.next_beat = now + self.beat_s
                self._send(agent, {"kind": "beat"})
        due = [item for item in self._again if now >= item[0]]
        self._again = [item for item in self._again if now < item[0]] + due[CONNECTS:]
        for _, agent in due[:CONNECTS]:
            self._connect(agent)


def _is_writable(connection: socket.socket) -> bool:
    poller = select.poll()  # unlike select(), it accepts any descriptor
    poller.register(connection, select.POLLOUT)
    return bool(poller.poll(0))


@dataclass(frozen=True)
class CrowdProcess:
    """A crowd in a separate process, as the benchmark sees it."""

    process: SpawnProcess
    orders: Connection

    def seen(self, kind: str) -> tuple[list[float], int]:
        """Returns and forgets when agents received messages of this kind, and how often any had to connect again."""
        self.orders.send(("seen", kind))
        found: tuple[list[float], int] = self.orders.recv()
        return found


def crowd_main(server: ServerAddress, nodes: Sequence[Node], beat_s: float, orders: Connection) -> None:
    agents = {node.number: SimulatedAgent(hello_of(node)) for node in nodes}
    Crowd(server, agents, beat_s, orders).run()


def hello_of(node: Node) -> bytes:
    """Returns the message with which the agent of ``node`` introduces it, sooner than ``Node.to_json`` does."""
    message = {"kind": "hello", "node": node}
    return json.dumps(message, separators=(",", ":"), default=_fields).encode() + b"\n"


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}
