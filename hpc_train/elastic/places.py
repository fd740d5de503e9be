"""Where the nodes of a launch stand in the network, told by each agent to the one that gives out the ranks.

One file per node in ``attempts/`` of the run directory. Only where the site describes its switches; elsewhere the
order of the nodes is Slurm's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from hpc_train.cluster.allocation import Allocation
from hpc_train.cluster.topology import node_order, switch_address
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import read_json, write_json

POLL_S = 0.1


def tell_place(run: RunDirectory, allocation: Allocation) -> None:
    """Called by every agent of a launch of several nodes."""
    address = switch_address()
    if address is not None and allocation.nodes > 1:
        run.attempts.mkdir(parents=True, exist_ok=True)
        write_json(_file(run, allocation, allocation.node_rank), {"node": allocation.node_name, "address": address})


def order_of_nodes(
    run: RunDirectory, allocation: Allocation, give_up: Callable[[], bool], timeout: float
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Slurm's numbers of the nodes, and their names where they are known, in the order of rank.

    Raises:
        TimeoutError: an agent has not told its place in ``timeout`` seconds.
    """
    numbers = tuple(range(allocation.nodes))
    if switch_address() is None or allocation.nodes == 1:
        return numbers, ()
    files = [_file(run, allocation, number) for number in numbers]
    until = time.monotonic() + timeout
    # listed, not looked up one by one: a network file system remembers for long that a name was not there
    while missing := sorted({*files} - {*run.attempts.glob(f"place-{allocation.launch_id}.node-*")}):
        if give_up():
            return numbers, ()
        if time.monotonic() > until:
            raise TimeoutError(f"after {timeout:.0f} s these are not there: " + ", ".join(map(str, missing)))
        time.sleep(POLL_S)
    places = [read_json(path) for path in files]
    order = node_order([place["address"] for place in places])
    return order, tuple(f"{places[number]['node']} ({places[number]['address']})" for number in order)


def _file(run: RunDirectory, allocation: Allocation, node_rank: int) -> Path:
    return run.attempts / f"place-{allocation.launch_id}.node-{node_rank}"
