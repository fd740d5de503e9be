"""Where the workers of an attempt meet: a port that the agent of node 0 has bound before anybody hears of it.

The port is derived from the launch, so that a restarted attempt does not fall on its predecessor's port, and the next
candidate is taken where another process listens already. The listening socket itself is handed to rank 0: there is no
moment in which somebody else could take the port.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from hpc_train.cluster.allocation import LOOPBACK, Allocation
from hpc_train.config.layout import Layout
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import read_json, write_json

FIRST_PORT, PORTS = 15000, 15000  # below the range from which kernels hand out ephemeral ports
CANDIDATES = 200
POLL_S = 0.2


@dataclass(frozen=True)
class Meeting:
    """What all agents of an attempt must agree on, as ``attempts/NNN.json`` holds it.

    ``order`` holds Slurm's numbers of the nodes in the order of rank.
    """

    attempt: int
    launch_id: str
    job_id: str | None
    node: str
    pid: int
    started: float
    address: str
    port: int
    nodes: int
    gpus_per_node: int
    workers_per_node: int
    layout: Layout
    order: tuple[int, ...]

    def publish(self, run: RunDirectory) -> None:
        write_json(run.attempts / f"{self.attempt:03d}.json", asdict(self))

    @classmethod
    def parse(cls, value: dict[str, Any]) -> Meeting:
        layout = value["layout"] | {"notes": tuple(value["layout"]["notes"])}
        return cls(**value | {"layout": Layout(**layout), "order": tuple(value["order"])})


def bind(allocation: Allocation, seed: str) -> socket.socket:
    """A listening socket on the first free candidate port; on loopback where there is only one node.

    Raises:
        OSError: no candidate is free.
    """
    host = LOOPBACK if allocation.nodes == 1 else ""
    for port in candidate_ports(seed):
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.bind((host, port))
            listener.listen(1024)
            return listener
        except OSError:
            listener.close()
    raise OSError(f"none of {CANDIDATES} ports between {FIRST_PORT} and {FIRST_PORT + PORTS} is free")


def candidate_ports(seed: str) -> Iterator[int]:
    for number in range(CANDIDATES):
        digest = hashlib.sha256(f"{seed}:{number}".encode()).digest()
        yield FIRST_PORT + int.from_bytes(digest[:4], "big") % PORTS


def wait_for_meeting(run: RunDirectory, launch_id: str, give_up: Callable[[], bool], timeout: float) -> Meeting | None:
    """The meeting that node 0 publishes for this launch; None when ``give_up`` says so first.

    Raises:
        TimeoutError: node 0 has published nothing in ``timeout`` seconds.
    """
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        for path in sorted(run.attempts.glob("[0-9]*.json"), reverse=True):
            if path.stat().st_size and (value := read_json(path))["launch_id"] == launch_id:
                return Meeting.parse(value)
        if give_up():
            return None
        time.sleep(POLL_S)
    raise TimeoutError(f"the agent of node 0 has not said where to meet in {timeout:.0f} s")
