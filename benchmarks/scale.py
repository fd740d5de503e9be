"""What the control plane of a job costs with many nodes, measured against the real rendezvous server.

    python -m benchmarks.scale [--nodes 64,250,1000] [--store 1000,2000,4000] [--idle 10] [--json FILE]

A process runs the server with its coordinator, the decision on the network environment and the records of attempts, as
the agent of the batch host does. Other processes hold the connections of all agents (``simulated_nodes``): they join at
once, a connection is closed, a node freezes, and all report the end of their workers. No GPU, worker or Slurm is
needed. 10,000 nodes need 20,000 descriptors and a few minutes. ``--store`` measures torch's store with that many
clients instead of nodes.

Seconds of the wall clock depend on what else the machine does; those of the server's processor hardly do.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from benchmarks.simulated_nodes import GPUS, CrowdProcess, crowd_main, hello_of, simulated
from hpc_train.config.schema import BatchConfig, ClusterConfig, Config, ElasticConfig, GPTConfig, StrategyConfig
from hpc_train.elastic.attempts import Attempts
from hpc_train.elastic.decision import History
from hpc_train.elastic.fabric import Fabric
from hpc_train.elastic.nodes import NodeFailures
from hpc_train.elastic.rendezvous.addresses import ServerAddress, bind
from hpc_train.elastic.rendezvous.channel import Message
from hpc_train.elastic.rendezvous.coordinator import Coordinator
from hpc_train.elastic.rendezvous.messages import Start
from hpc_train.elastic.rendezvous.server import RendezvousServer, beat_s
from hpc_train.elastic.rendezvous.store import Stores
from hpc_train.machine.allocation import Allocation
from hpc_train.preflight.bandwidth import expected_bandwidths, read_fabric
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.processes import raise_descriptor_limit

AGENTS_PER_PROCESS = 2500
LIMIT_S = 600.0
MODEL = GPTConfig(vocab_size=256, n_layers=2, dim=16, n_heads=2, n_kv_heads=2, ffn_dim=32)


@dataclass(frozen=True)
class Row:
    """What was measured with ``nodes`` nodes; seconds unless the name says otherwise.

    Attributes:
        hello_bytes: the message in which an agent describes its node.
        join: from the first connection until the last agent has the order to start.
        join_cpu: of the server's process in that time.
        begin_cpu: of preparing the attempt in the server: the decision on the environment and the files.
        start_bytes: the message with which the attempt starts, per agent.
        closed, frozen: from a closed connection, or the last heartbeat, until the last agent is told to end.
        restart: from the end of the attempt until the last agent has the order to start again.
        leave: from the reports of all agents until the last one knows the end of the job.
        closed_cpu, frozen_cpu, leave_cpu: of the server's process in these times, with the restarts that follow.
        idle_share: the share of a core that the server's process uses while nothing happens.
        server_bytes: the memory of the server's process at the end.
        fabric_bytes: ``fabric.json``.
        expected: reading ``fabric.json`` and deriving the expected bandwidths, in a rank that does it.
        retries: connections that agents had to repeat.
    """

    nodes: int
    hello_bytes: int
    join: float
    join_cpu: float
    begin_cpu: float
    start_bytes: int
    closed: float
    frozen: float
    restart: float
    leave: float
    closed_cpu: float
    frozen_cpu: float
    leave_cpu: float
    idle_share: float
    server_bytes: int
    fabric_bytes: int
    expected: float
    retries: int


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--nodes", default="64,250,1000")
    parser.add_argument("--store", help="numbers of clients of torch's store")
    parser.add_argument("--idle", type=float, default=10.0, help="seconds for which the idle server is watched")
    parser.add_argument("--json", type=Path, help="file to which each row is appended")
    options = parser.parse_args()
    raise_descriptor_limit()
    for count in map(int, (options.store or options.nodes).split(",")):
        if options.store:
            from benchmarks.store_clients import measure_store

            found = measure_store(count)
        else:
            found = asdict(measure(count, options.idle))
        print(json.dumps(found), flush=True)
        if options.json is not None:
            with options.json.open("a") as file:
                file.write(json.dumps(found) + "\n")


def measure(count: int, idle_s: float) -> Row:
    """Takes a job of ``count`` nodes through its life."""
    nodes = simulated(count)
    beat = beat_s(config_of(count).elastic.heartbeat_timeout_s, count)
    parts = [nodes[first : first + AGENTS_PER_PROCESS] for first in range(0, count, AGENTS_PER_PROCESS)]
    with (
        tempfile.TemporaryDirectory(prefix="hpc_train-scale-") as folder,
        served(Path(folder), count) as (pid, told),
        crowds(told.recv(), parts, beat) as all_crowds,
    ):
        found = lead(Path(folder), count, psutil.Process(pid), told, all_crowds, idle_s)
    return Row(nodes=count, hello_bytes=len(hello_of(nodes[0])), **found)


def lead(
    folder: Path, count: int, server: psutil.Process, told: Connection, agents: Sequence[CrowdProcess], idle_s: float
) -> dict[str, Any]:
    """Returns what happens to a job: all join, a connection is closed, a node freezes, and the others finish."""
    cpu, began = cpu_s(server), time.monotonic()
    order(agents, "connect")
    join = when_all(agents, "start", count) - began
    join_cpu = cpu_s(server) - cpu
    begin_cpu, start_bytes = told.recv()
    expected, fabric_bytes = read_by_a_rank(RunDirectory(folder))
    idle = idle_share(server, idle_s)
    cpu = cpu_s(server)
    closed, restart = lose(agents, "close", count // 2, count - 1)
    closed_cpu, cpu = cpu_s(server) - cpu, cpu_s(server)
    frozen, _ = lose(agents, "freeze", count // 3, count - 2)
    frozen_cpu, cpu = cpu_s(server) - cpu, cpu_s(server)
    began = time.monotonic()
    order(agents, "report")
    leave = when_all(agents, "leave", count - 2) - began
    leave_cpu = cpu_s(server) - cpu
    memory = server.memory_info().rss
    retries = sum(each.seen("leave")[1] for each in agents)
    order(agents, "leave")
    seconds = {"join": join, "join_cpu": join_cpu, "begin_cpu": begin_cpu, "closed": closed, "frozen": frozen}
    seconds |= {"restart": restart, "leave": leave, "expected": expected, "idle_share": idle}
    seconds |= {"closed_cpu": closed_cpu, "frozen_cpu": frozen_cpu, "leave_cpu": leave_cpu}
    sizes = {"start_bytes": start_bytes, "server_bytes": memory, "fabric_bytes": fabric_bytes, "retries": retries}
    return {name: round(value, 4) for name, value in seconds.items()} | sizes


def lose(agents: Sequence[CrowdProcess], how: str, number: int, left: int) -> tuple[float, float]:
    """Returns the seconds until all other agents are told to end, and from then on until they start again."""
    began = time.monotonic()
    order(agents, how, number)
    ended = when_all(agents, "end", left)
    return ended - began, when_all(agents, "start", left) - ended


def config_of(count: int) -> Config:
    return Config(
        cluster=ClusterConfig(gpus_per_node=GPUS),
        strategy=StrategyConfig(name="dp", dp="fill"),
        model=MODEL,
        batch=BatchConfig(global_size=count * GPUS),
        elastic=ElasticConfig(min_nodes=max(1, count - 8)),
    )


@contextmanager
def served(folder: Path, count: int) -> Iterator[tuple[int, Connection]]:
    """Runs the server in a process; yields its process id and the connection on which it tells what it does."""
    told, tell = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(folder, count, tell))
    process.start()
    try:
        assert process.pid is not None
        yield process.pid, told
        process.join(30)
    finally:
        process.kill()
        process.join()


def serve(folder: Path, count: int, tell: Connection) -> None:
    """Runs the rendezvous server of a job of ``count`` nodes as the agent of its first node does."""
    sys.stdout = sys.stderr = (folder / "output").open("w")
    raise_descriptor_limit()
    run, config = RunDirectory(folder), config_of(count)
    run.create()
    names = tuple(node.name for node in simulated(1)) + tuple(f"node{number:05d}" for number in range(1, count))
    allocation = Allocation(count, 0, names[0], None, f"scale.{os.getpid()}", "127.0.0.1", names)
    events = EventLog.open(run, "agent-node00000", 0)
    attempts = Attempts(run, config, allocation, None, Stores("none:none"), Fabric(run, config, []), events)
    failures = NodeFailures(run, 3600)
    coordinator = Coordinator(config, count, History(0), failures, time.monotonic() + LIMIT_S, names=names)
    listener = bind(allocation, allocation.launch_id)

    def begin(start: Start) -> Message:
        began = time.thread_time()
        spec = attempts.begin(start)
        seconds = time.thread_time() - began
        tell.send((seconds, len(json.dumps({"kind": "start", "spec": spec}, separators=(",", ":")))))
        return spec

    token, timeout = secrets.token_hex(16), config.elastic.heartbeat_timeout_s
    server = RendezvousServer(coordinator, listener, token, timeout, begin, attempts.leave)
    server.start()
    tell.send(ServerAddress("127.0.0.1", listener.getsockname()[1], token))
    server._thread.join(2 * LIMIT_S)


@contextmanager
def crowds(address: ServerAddress, parts: Sequence[Sequence[object]], beat: float) -> Iterator[list[CrowdProcess]]:
    context, found = multiprocessing.get_context("spawn"), []
    try:
        for part in parts:
            ours, theirs = multiprocessing.Pipe()
            process = context.Process(target=crowd_main, args=(address, part, beat, theirs))
            process.start()
            found.append(CrowdProcess(process, ours))
        for each in found:
            each.seen("nothing")  # wait until it has started
        yield found
    finally:
        for each in found:
            with suppress(OSError):
                each.orders.send(("end", None))
        for each in found:
            each.process.join(30)
            each.process.kill()


def order(all_crowds: Sequence[CrowdProcess], what: str, argument: object = None) -> None:
    for each in all_crowds:
        each.orders.send((what, argument))


def when_all(all_crowds: Sequence[CrowdProcess], kind: str, count: int) -> float:
    """Waits until ``count`` agents have received a message of this kind; returns when the last one did.

    Raises:
        TimeoutError: some have not after ``LIMIT_S``.
    """
    times: list[float] = []
    until = time.monotonic() + LIMIT_S
    while len(times) < count:
        for each in all_crowds:
            times += each.seen(kind)[0]
        if time.monotonic() > until:
            raise TimeoutError(f"{len(times)} of {count} agents were told to {kind}")
        time.sleep(0.05)
    return max(times)


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def idle_share(process: psutil.Process, seconds: float) -> float:
    cpu, began = cpu_s(process), time.monotonic()
    time.sleep(seconds)
    return (cpu_s(process) - cpu) / (time.monotonic() - began)


def read_by_a_rank(run: RunDirectory) -> tuple[float, int]:
    """Returns the processor seconds in which a rank reads the facts, and the size of the file."""
    began = time.process_time()
    expected = expected_bandwidths(read_fabric(run), GPUS)
    assert expected.world is not None
    return time.process_time() - began, run.fabric.stat().st_size


if __name__ == "__main__":
    main()
