"""Where agents and workers meet: ports that the hub has bound before anybody hears of them.

A port is derived from the launch and the attempt, so that an attempt does not fall on its predecessor's port, and the
next candidate is taken where another process listens already. The listening socket of the workers' store is handed to
the store itself: there is no moment in which somebody else could take the port.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_train.cluster.allocation import LOOPBACK, Allocation
from hpc_train.plan.layout import Layout
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import read_json, write_json

FIRST_PORT, PORTS = 15000, 15000  # below the range from which kernels hand out ephemeral ports
CANDIDATES = 200


@dataclass(frozen=True)
class Meeting:
    """What all agents of an attempt must agree on, as ``attempts/NNN.json`` holds it.

    ``order`` holds Slurm's numbers of the nodes in the order of rank, ``environment`` what all workers export.
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
    environment: dict[str, str]

    def publish(self, run: RunDirectory) -> None:
        """For readers; the agents are told by the hub."""
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


@dataclass(frozen=True)
class ServerAddress:
    """Where the hub of a launch listens, and the word without which it takes nobody in.

    Agents of other nodes find it in ``attempts/hub-<launch>.json``, which only the run's user, or group, can read.
    """

    host: str
    port: int
    token: str

    def publish(self, run: RunDirectory, launch_id: str) -> None:
        path = _hub_file(run, launch_id)
        temporary = path.with_suffix(".new")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o660 if _for_group(run) else 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    @classmethod
    def find(cls, run: RunDirectory, launch_id: str) -> ServerAddress | None:
        """None where the hub has not published it yet."""
        # listed, not looked up: a network file system remembers for long that a name was not there
        path = _hub_file(run, launch_id)
        return cls(**read_json(path)) if path in set(run.attempts.glob("hub-*.json")) else None


def withdraw(run: RunDirectory, launch_id: str) -> None:
    """The hub of a launch takes nobody in any more."""
    _hub_file(run, launch_id).unlink(missing_ok=True)


def _hub_file(run: RunDirectory, launch_id: str) -> Path:
    return run.attempts / f"hub-{launch_id}.json"


def _for_group(run: RunDirectory) -> bool:
    return bool(run.path.stat().st_mode & stat.S_ISGID)
