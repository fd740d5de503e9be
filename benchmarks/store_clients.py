"""Clients of torch's store, as many as ranks rendezvous, from threads of a few processes (``scale --store``).

Each client does what a rank does when it joins a world in which gloo connects on demand: it connects, publishes its
address, waits for all others, and reads the addresses of the ranks that it talks to in a tree.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import socket
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

PROCESSES = 4
TIMEOUT_S = 300.0
ADDRESS = "x" * 120  # as long as an address of gloo


def measure_store(count: int) -> dict[str, Any]:
    """Returns the seconds of each stage until the last of ``count`` clients has done it, and the server's costs."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs,))
    server.start()
    port = ours.recv()
    process = psutil.Process(server.pid)
    memory, cpu = process.memory_info().rss, process.cpu_times()
    crowds = []
    for number in range(PROCESSES):
        here, there = context.Pipe()
        crowd = context.Process(target=_join, args=(port, range(number, count, PROCESSES), count, there))
        crowd.start()
        crowds.append((crowd, here))
    ready = max(here.recv() for _, here in crowds)
    for _, here in crowds:
        here.send(None)
    stages = [here.recv() for _, here in crowds]
    used = process.cpu_times()
    connected, met, exchanged = (max(stage[name] for stage in stages) for name in ("connected", "met", "exchanged"))
    row = {
        "clients": count,
        "connect": round(connected - ready, 3),
        "meet": round(met - connected, 3),
        "exchange": round(exchanged - met, 3),
        "server_cpu": round(used.user + used.system - cpu.user - cpu.system, 3),
        "bytes_per_client": (process.memory_info().rss - memory) // count,
    }
    for crowd, here in crowds:
        here.send(None)
        crowd.join()
    server.kill()
    server.join()
    return row


def _be_quiet() -> None:
    """Drops torch's warnings, one per client, that the address of a client has no name."""
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 2)


def _serve(orders: Connection) -> None:
    from hpc_train.elastic.rendezvous.store import serve
    from hpc_train.run.processes import raise_descriptor_limit

    raise_descriptor_limit()
    _be_quiet()
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = listener.getsockname()[1]
    store = serve(listener)
    orders.send(port)
    while store is not None:
        time.sleep(1)


def _join(port: int, ranks: range, count: int, orders: Connection) -> None:
    import torch.distributed  # noqa: F401 - imported before the clock starts

    from hpc_train.run.processes import raise_descriptor_limit

    raise_descriptor_limit()
    _be_quiet()
    orders.send(time.monotonic())
    orders.recv()
    times: dict[str, list[float]] = {"connected": [], "met": [], "exchanged": []}
    threading.stack_size(256 << 10)
    ended = threading.Event()
    threads = [threading.Thread(target=_rank, args=(port, rank, count, times, ended)) for rank in ranks]
    for thread in threads:
        thread.start()
    while len(times["exchanged"]) < len(ranks):
        time.sleep(0.05)
    orders.send({name: max(found) for name, found in times.items()})
    orders.recv()
    ended.set()


def _rank(port: int, rank: int, count: int, times: dict[str, list[float]], ended: threading.Event) -> None:
    from datetime import timedelta

    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", port, count, timeout=timedelta(seconds=TIMEOUT_S), wait_for_workers=False)
    times["connected"].append(time.monotonic())
    store.set(f"rank-{rank}", ADDRESS)
    if store.add("joined", 1) == count:
        store.set("all", "1")
    store.wait(["all"])
    times["met"].append(time.monotonic())
    for distance in range(math.ceil(math.log2(count))):
        store.get(f"rank-{(rank + 2**distance) % count}")
    times["exchanged"].append(time.monotonic())
    ended.wait()
