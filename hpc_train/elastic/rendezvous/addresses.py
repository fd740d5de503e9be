"""Addresses and ports of a rendezvous: the server binds ports before it publishes them.

A port is derived from the launch and the attempt, so that consecutive attempts use different ports; if it is taken, the
next candidate is used. The bound socket of the workers' store is passed to the store, so no other process can take it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import socket
import stat
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_train.layout.layout import Layout
from hpc_train.machine.allocation import Allocation
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import write_json

FIRST_PORT, PORTS = 15000, 15000  # below the kernel's range of ephemeral ports
CANDIDATES = 200
BACKLOG = 16384  # all agents of a job may connect at once; the kernel lowers it to net.core.somaxconn


@dataclass(frozen=True)
class AttemptSpec:
    """Holds what all agents of an attempt must agree on, as recorded in ``attempts/NNN.json``.

    ``order`` lists Slurm's node numbers in the order of rank; ``environment`` is exported by all workers. The keys of
    the ranks in the store begin with ``store_prefix``, which is random and not recorded. Workers are killed
    ``stop_grace_s`` seconds after a stop request. The job holds ``held_nodes`` nodes, spares and lost ones included.
    ``checked``: a preflight of this start of the job has checked all of these nodes.
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
    store_prefix: str
    stop_grace_s: float
    held_nodes: int
    checked: bool = False

    def path(self, run: RunDirectory) -> Path:
        return run.attempts / f"{self.attempt:03d}.json"

    def publish(self, run: RunDirectory, fabric: dict[str, Any] | None = None) -> None:
        """Writes the record for any reader; agents receive all of it from the server.

        Args:
            fabric: the content of ``fabric.json``, which an attempt on one node has here.
        """
        record = asdict(self)
        del record["store_prefix"]
        write_json(self.path(run), record if fabric is None else record | {"fabric": fabric})

    def message(self) -> dict[str, Any]:
        """Returns what agents receive, with ``order`` as runs of consecutive numbers: N agents receive it, so it must
        not list N nodes.
        """
        return asdict(self) | {"order": _runs(self.order)}

    @classmethod
    def parse(cls, value: dict[str, Any]) -> AttemptSpec:
        """Reads a ``message``."""
        layout = value["layout"] | {"notes": tuple(value["layout"]["notes"])}
        order = tuple(number for first, last in value["order"] for number in range(first, last + 1))
        return cls(**value | {"layout": Layout(**layout), "order": order})


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    """Returns the first and the last number of each run of consecutive numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return runs


def bind(allocation: Allocation, seed: str) -> socket.socket:
    """Returns a listening socket on the first free candidate port, on the address of the job's interface if it is known
    (or loopback if there is only one node).

    Raises:
        OSError: no candidate port is free, or the address is not (any more) one of this node.
    """
    for port in candidate_ports(seed):
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.bind((allocation.listen_address, port))
            listener.listen(BACKLOG)
            return listener
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRNOTAVAIL:
                raise OSError(error.errno, f"cannot listen on {allocation.listen_address}: {error.strerror}") from None
    raise OSError(f"none of {CANDIDATES} ports between {FIRST_PORT} and {FIRST_PORT + PORTS} is free")


def candidate_ports(seed: str) -> Iterator[int]:
    for number in range(CANDIDATES):
        digest = hashlib.sha256(f"{seed}:{number}".encode()).digest()
        yield FIRST_PORT + int.from_bytes(digest[:4], "big") % PORTS


@dataclass(frozen=True)
class ServerAddress:
    """The address of a launch's rendezvous server and the token that admits a client.

    Agents of other nodes read it from ``attempts/server-<launch>.json``, which only the run's user or group can read.
    """

    host: str
    port: int
    token: str

    def publish(self, run: RunDirectory, launch_id: str) -> None:
        path = _address_file(run, launch_id)
        # in a directory of a group, nobody else can have made or know this file
        temporary = path.with_name(f".{path.stem}-{secrets.token_hex(16)}.new")
        for_group = run.path.stat().st_mode & stat.S_ISGID
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, 0o660 if for_group else 0o600), "w") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    @classmethod
    def find(cls, run: RunDirectory, launch_id: str) -> ServerAddress | None:
        """Returns the address, or None if the server has not published it yet."""
        # list the directory: a network file system caches the absence of a name for a long time
        path = _address_file(run, launch_id)
        if path in set(run.attempts.glob("server-*.json")):
            return cls(**run.json(path))
        return None


def withdraw(run: RunDirectory, launch_id: str) -> None:
    """Removes the published address of a launch's server."""
    _address_file(run, launch_id).unlink(missing_ok=True)


def _address_file(run: RunDirectory, launch_id: str) -> Path:
    return run.attempts / f"server-{launch_id}.json"
