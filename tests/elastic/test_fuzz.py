"""Seeded attacks on a rendezvous server in a separate process, while three honest agents go through attempts.

After each round the honest agents must have ended one attempt and started the next, and the server must hold no
descriptor or memory of the attackers. The long form (``HPC_TRAIN_LONG=1``) attacks for ten minutes.
"""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from hpc_train.elastic.decision import WorkerFailure
from hpc_train.elastic.hangs import GroupState, RankState
from hpc_train.elastic.nodes import Node
from hpc_train.elastic.rendezvous.addresses import ServerAddress
from hpc_train.elastic.rendezvous.client import RendezvousClient
from hpc_train.elastic.rendezvous.messages import NodeReport, report_message
from hpc_train.machine.network.facts import Gpu, GpuLink, Interface, Nic, NodeFacts, Port, Setting
from hpc_train.run.exits import Exit, Failure
from tests.checkpoint.progress import LONG
from tests.elastic.fuzzed_server import NODES, SILENT_S, TOKEN
from tests.elastic.test_agent import until

SEED = int(os.environ.get("HPC_TRAIN_SEED", "0"))
ROUNDS, ATTACKS = 3, 20
LONG_S, LONG_ATTACKS = 600.0, 200
WAIT_S = 60.0
SPARE = NODES - 1  # the node that attackers with the token may be
MORE_MEMORY = 32 << 20  # the heap has fragments after a message of some megabytes

FACTS = NodeFacts(
    node="n3",
    gpus=(Gpu(0, "0000:01:00.0", "H100", "GPU-1", (0,), (0, 1)),),
    nics=(Nic("mlx5_0", "mellanox", "MT4129", None, 0, ("ib0",), (Port(1, "ACTIVE", "LINKUP", "InfiniBand", 400.0),)),),
    interfaces=(Interface("ib0", True, 400.0),),
    links=(GpuLink("GPU0", "mlx5_0", "PIX"),),
    cores=((0, 1),),
    allowed=(0, 1),
    numa=((0, 1),),
    visible=("0",),
    versions=(("torch", "2.13"),),
    settings=(Setting("NCCL_DEBUG", "WARN", "the environment"),),
)


def node(number: int) -> Node:
    return Node(number, f"n{number}", f"n{number}", None, 0, 2)


def hello(number: int = SPARE) -> dict[str, Any]:
    value = Node(number, f"n{number}", f"n{number}", "s1", 0, 2, facts=FACTS).to_json()
    return {"kind": "hello", "node": json.loads(json.dumps(value)), "process": {"host": "elsewhere", "pid": 1}}


def ended(attempt: int) -> dict[str, Any]:
    state = RankState(0, "n3", 9, "STEP", 1.0, 9, "S", True, {"0": GroupState(1, True, "ALLREDUCE")})
    states = json.loads(json.dumps([{**vars(state), "groups": {"0": vars(state.groups["0"])}}]))
    failure = WorkerFailure(0, Failure.HANG, "a", "b", 0.0, -9, False, tuple(states), ("gpu 0",))
    return json.loads(json.dumps(report_message(attempt, NodeReport(Exit.FAILED, failure, 1 << 40))))


def line(message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


def junk(draw: random.Random, depth: int = 3) -> Any:
    """Any JSON value, of which none is the text that a field for texts would take."""
    simple = [None, True, -1, 1 << 70, 1.5, float("nan"), float("inf"), -0.0, 10**300]
    if depth == 0 or draw.random() < 0.6:
        return draw.choice(simple)
    if draw.random() < 0.5:
        return [junk(draw, depth - 1) for _ in range(draw.randint(0, 4))]
    return {draw.choice(["a", "kind", "\udc80", "node"]): junk(draw, depth - 1) for _ in range(draw.randint(0, 4))}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path to each field of a message, at any depth."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def damaged(draw: random.Random, message: dict[str, Any]) -> dict[str, Any]:
    """``message`` with one field of another value, without it, or with one too many."""
    message = deepcopy(message)
    *path, last = draw.choice(list(places(message)))
    inside: Any = message
    for key in path:
        inside = inside[key]
    how = draw.randrange(5)
    if how == 0 and isinstance(inside, dict):
        del inside[last]
    elif how == 1 and isinstance(inside, dict):
        inside["one too many"] = junk(draw)
    elif how == 2 and isinstance(inside, list):
        inside.append(junk(draw))
    else:
        inside[last] = junk(draw)
    return message


NESTED = [b"[" * 100_000, b'{"a":' * 5000, b"[" * 900 + b"]" * 900, b'{"kind":' + b"[" * 980 + b"]" * 980 + b"}"]
HUGE = [b"x" * (5 << 20), b"[" + b"[]," * (1 << 20) + b"0]", b'{"kind":"' + b"y" * (3 << 20) + b'"}', b"9" * 10_000]


@dataclass
class Attacker:
    """Attacks the server; ``held`` are the connections that it has not closed."""

    port: int
    draw: random.Random
    attempt: int = 0
    held: list[socket.socket] = field(default_factory=list)

    def attack(self) -> None:
        kinds: list[Callable[[], None]] = [
            self.without_token, self.flood, self.with_garbage, self.damages_its_hello, self.damages_its_hello,
            self.damages_a_message, self.damages_a_message, self.is_another_node, self.reports_as_a_spare,
            self.sends_too_often, self.stops_anywhere, self.is_slow, self.says_nothing, self.does_not_receive,
        ]  # fmt: skip
        with suppress(OSError):  # the server has closed the connection already
            self.draw.choice(kinds)()

    def connect(self, *said: bytes) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)
        self.held.append(connection)
        for part in said:
            connection.sendall(part)
        return connection

    def release(self) -> None:
        for connection in self.held:
            if self.draw.random() < 0.3:  # a reset instead of an end
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        self.held.clear()

    def without_token(self) -> None:
        wrong = TOKEN[:-1].encode() + b"0"
        half = TOKEN[: self.draw.randrange(len(TOKEN))].encode()
        noise = self.draw.randbytes(self.draw.randint(1, 1000))
        said = self.draw.choice([b"", half, wrong + line(hello()), noise, b"GET / HTTP/1.1\r\n\r\n", *NESTED, *HUGE])
        self.connect(said)

    def flood(self) -> None:
        for _ in range(self.draw.randint(2, 60)):
            self.connect()

    def joined(self, *said: bytes) -> socket.socket:
        return self.connect(TOKEN.encode(), line(hello()), *said)

    def with_garbage(self) -> None:
        noise = self.draw.randbytes(self.draw.randint(1, 1000))
        texts = [
            line(junk(self.draw)),
            noise + b"\n",
            b'{"kind": "\\ud800"}\n',
            b"\xff\n",
            *(text + b"\n" for text in NESTED),
        ]
        said = self.draw.choice([*texts, *(text + b"\n" for text in HUGE), HUGE[0]])
        self.draw.choice([self.joined, lambda *rest: self.connect(TOKEN.encode(), *rest)])(said)

    def damages_its_hello(self) -> None:
        self.connect(TOKEN.encode(), line(damaged(self.draw, hello())))

    def damages_a_message(self) -> None:
        """Only messages that no agent would send: a stop that is spelled rightly ends the job, as it should."""
        stop, quit_ = {"kind": "stop", "reason": junk(self.draw)}, {"kind": "quit", "message": junk(self.draw)}
        whole = [ended(self.attempt), {"kind": "store_lost", "attempt": self.attempt}, {"kind": "beat"}]
        bad = [stop, quit_, *(damaged(self.draw, message) for message in whole), hello(), {"kind": "bye"}]
        self.joined(line(self.draw.choice(bad)))

    def is_another_node(self) -> None:
        number = self.draw.choice([0, 1, 2, -1, NODES, 10**9, True, 1.0, float("nan"), "0", None])
        value = hello()
        value["node"]["number"] = number
        self.connect(TOKEN.encode(), line(value))

    def reports_as_a_spare(self) -> None:
        """A spare has no workers that could have failed, and no store."""
        lost = {"kind": "store_lost", "attempt": self.attempt}
        self.joined(line(ended(self.attempt)), line(lost), line(ended(self.attempt)))

    def sends_too_often(self) -> None:
        self.joined(line({"kind": "beat"}) * self.draw.randint(2, 20_000))

    def stops_anywhere(self) -> None:
        whole = TOKEN.encode() + line(hello()) + line({"kind": "beat"}) + line(ended(self.attempt))
        self.connect(whole[: self.draw.randrange(len(whole))])
        self.draw.choice([self.release, lambda: None])()

    def is_slow(self) -> None:
        whole = self.draw.choice([TOKEN.encode(), TOKEN.encode() + line(hello())])
        connection = self.connect()
        for byte in whole[: self.draw.randint(1, 30)]:
            connection.sendall(bytes([byte]))
            time.sleep(0.001)

    def says_nothing(self) -> None:
        for _ in range(self.draw.randint(1, 60)):
            self.connect(TOKEN.encode())

    def does_not_receive(self) -> None:
        self.joined().shutdown(socket.SHUT_RD)


class Target:
    """The server's process, and what it needs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        self.port = int(process.stdout.readline())

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))  # noqa: PTH208

    @property
    def memory(self) -> int:
        """Bytes that are resident."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def served(folder: Path) -> Iterator[Target]:
    call = [sys.executable, "-m", "tests.elastic.fuzzed_server", str(folder)]
    with (
        (folder / "stderr").open("w") as errors,
        subprocess.Popen(call, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            yield Target(process)
        finally:
            process.kill()


class Job:
    """Three honest agents, and the attempts that they go through."""

    def __init__(self, port: int) -> None:
        address = ServerAddress("127.0.0.1", port, TOKEN)
        self.agents = [RendezvousClient.connect(address, node(number), SILENT_S) for number in range(SPARE)]
        self.attempt = -1

    def begin(self) -> None:
        self.attempt += 1
        for agent in self.agents:
            order = until(partial(agent.order, 0.1), timeout=WAIT_S)
            assert order["kind"] == "start", order
            assert (order["spec"]["attempt"], order["spec"]["order"]) == (self.attempt, [0, 1, 2])

    def restart(self) -> None:
        """One node fails, the others must be told to end, and all must be told to start again."""
        failure = WorkerFailure(0, Failure.USER_ERROR, "failed", "Traceback", 0.0)
        first, *others = self.agents
        first.send_attempt_end(self.attempt, NodeReport(Exit.FAILED, failure, self.attempt + 1))
        for agent in others:
            until(partial(agent.is_to_end, self.attempt), timeout=WAIT_S)
            assert not agent.lost
            agent.send_attempt_end(self.attempt, NodeReport(Exit.FAILED, None, self.attempt + 1))
        self.begin()

    def finish(self) -> None:
        for agent in self.agents:
            agent.send_attempt_end(self.attempt, NodeReport(Exit.DONE, None, self.attempt + 1))
        for agent in self.agents:
            assert until(partial(agent.order, 0.1), timeout=WAIT_S)["code"] == Exit.DONE


@pytest.mark.timeout(int(LONG_S) + 300)
def test_attackers_cost_the_honest_agents_nothing(tmp_path: Path) -> None:
    print(f"seed: HPC_TRAIN_SEED={SEED}")
    with served(tmp_path) as target, ExitStack() as end:
        job, attacker = Job(target.port), Attacker(target.port, random.Random(SEED))
        end.callback(attacker.release)
        attacker.joined()  # otherwise the first attempt waits for the spare
        job.begin()
        attacker.release()
        began, before, memory = time.monotonic(), target.descriptors, list[int]()
        while len(memory) < ROUNDS or (LONG and time.monotonic() - began < LONG_S):
            attacker.attempt = job.attempt
            for _ in range(LONG_ATTACKS if LONG else ATTACKS):
                attacker.attack()
            job.restart()
            attacker.release()
            until(lambda: target.descriptors <= before, timeout=WAIT_S)
            memory.append(target.memory)
        job.finish()
    print(f"{len(memory)} rounds, {min(memory) >> 20} to {max(memory) >> 20} MiB")
    quarter = max(1, len(memory) // 4)
    assert median(memory[-quarter:]) - median(memory[:quarter]) < MORE_MEMORY
