"""Checks whether the nodes of an allocation reach each other by TCP on the ports that agents and workers use.

Every node listens on a port of the agents' range and connects to the first node, as agents do, and to the next one, as
a ring does. So each pair of neighbors is tested in a time that does not grow with the number of nodes.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from hpc_train.elastic.rendezvous.addresses import FIRST_PORT, PORTS, candidate_ports
from hpc_train.machine.health.finding import ERROR, OK, Finding

SUBJECT = "TCP"
TRIES = 3  # ports that a node tries to listen on
LIMIT_S = 60.0  # until all nodes have started
ATTEMPT_S = 2.0  # for a connection
SILENT = 2 * TRIES  # attempts without any answer; a node that has not started yet refuses instead
RANGE = f"{FIRST_PORT}-{FIRST_PORT + PORTS - 1}"


def ports_of(seed: str, name: str) -> list[int]:
    """Returns the ports that the node ``name`` tries; all nodes derive them without exchanging anything."""
    return [port for port, _ in zip(candidate_ports(f"doctor:{seed}:{name}"), range(TRIES), strict=False)]


def peers(names: Sequence[str], this_node: str) -> list[str]:
    """Returns the nodes that ``this_node`` connects to: the first and the next one."""
    after = names[(names.index(this_node) + 1) % len(names)] if this_node in names else this_node
    return [name for name in dict.fromkeys((names[0], after)) if name != this_node]


def check_reach(names: Sequence[str], this_node: str, seed: str, limit_s: float = LIMIT_S) -> Iterator[Finding]:
    """Connects to peers and lets them connect, for at most ``limit_s`` seconds.

    Args:
        names: the nodes in the order of their number, by the names at which they are reached.
        seed: text that is equal on all nodes of this check.
    """
    if len(names) < 2 or this_node not in names:
        return
    until = time.monotonic() + limit_s
    listener = _listen(ports_of(seed, this_node))
    if listener is None:
        fix = "list listening sockets with `ss -ltn`; ask the site about a sandbox"
        yield Finding(SUBJECT, ERROR, f"cannot listen on ports of {RANGE}", fix)
        return
    callers = sum(this_node in peers(names, name) for name in names)
    answering = threading.Thread(target=_answer, args=(listener, callers, until), daemon=True)
    answering.start()
    problems = {name: _connect(name, ports_of(seed, name), until) for name in peers(names, this_node)}
    answering.join()
    failed = {name: problem for name, problem in problems.items() if problem}
    for name, problem in failed.items():
        text = f"no TCP connection from {this_node} to {name} on ports of {RANGE}: {problem}"
        fix = (
            f"ask the site to open ports {RANGE} between compute nodes; cluster.exclude={name} if it is this node alone"
        )
        yield Finding(SUBJECT, ERROR, text, fix)
    if not failed:
        yield Finding(SUBJECT, OK, f"connections to {', '.join(problems)} succeed on ports of {RANGE}")


def _listen(ports: Sequence[int]) -> socket.socket | None:
    for port in ports:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.bind(("", port))
            listener.listen(1024)
            return listener
        except OSError:
            listener.close()
    return None


def _answer(listener: socket.socket, callers: int, until: float) -> None:
    """Accepts a connection from each caller; returns early when all have connected."""
    seen: set[str] = set()
    with listener:
        while len(seen) < callers and (left := until - time.monotonic()) > 0:
            listener.settimeout(left)
            with suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(ATTEMPT_S)
                    seen.add(connection.recv(256).decode(errors="replace"))


def _connect(name: str, ports: Sequence[int], until: float) -> str | None:
    """Connects to one of ``ports``; returns the reason if none accepts in time. The other node may start later."""
    problem = "it does not respond"
    silent = 0
    while time.monotonic() < until and silent < SILENT:
        for port in ports:
            try:
                with socket.create_connection((name, port), timeout=ATTEMPT_S) as connection:
                    connection.sendall(f"{socket.gethostname()}:{os.getpid()}:{port}".encode())
                    return None
            except TimeoutError:
                problem = f"port {port} does not respond, as behind a firewall"
                silent = silent + 1
            except OSError as error:
                problem = error.strerror or str(error)
        time.sleep(0.1)
    return problem
