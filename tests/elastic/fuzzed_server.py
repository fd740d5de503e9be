"""A rendezvous server of ``NODES`` nodes, one of them a spare, in a separate process: the target of test_fuzz.py.

It decides the environment of each attempt from what the agents say about their nodes, as the real one does. It prints
its port, serves until the job is over, and prints the exit code of the agents.
"""

from __future__ import annotations

import socket
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

from hpc_train.elastic.fabric import Fabric
from hpc_train.elastic.rendezvous.messages import Leave, Start
from hpc_train.elastic.rendezvous.server import RendezvousServer
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.exits import EXITS
from tests.elastic.test_coordinator import Course

NODES = 4
TOKEN = "0123456789abcdef"
SILENT_S = 10.0


def serve(folder: Path) -> None:
    head = Course(folder, NODES, joined=0, spares=1).head
    head.join_until = time.monotonic() + 120
    run = RunDirectory(folder)
    fabric, events, attempts = Fabric(run, head.config, []), EventLog.open(run, "agent-n0", 0), count()

    def begin(start: Start) -> dict[str, Any]:
        attempt = next(attempts)
        environment = fabric.decide(start, events.of(attempt))
        return {"attempt": attempt, "order": [node.number for node in start.nodes], "environment": environment}

    def leave(order: Leave) -> int:
        print(f"{EXITS[order.decision.action]} {order.decision.reason}", flush=True)
        return EXITS[order.decision.action]

    listener = socket.create_server(("127.0.0.1", 0))
    server = RendezvousServer(head, listener, TOKEN, SILENT_S, begin, leave)
    server.start()
    print(listener.getsockname()[1], flush=True)
    server._thread.join()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
