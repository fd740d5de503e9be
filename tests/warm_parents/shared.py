"""Servers for all processes of a test session: the first process that needs one starts it, and the others use it, too.

The folder of the session has a FIFO, which the session's first process holds open. A server reads from it, and so ends
with that process, however it ends. Without a session a process has servers of its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

FOLDER = "TESTS_WARM_FOLDER"  # names the folder of the session
REPOSITORY = Path(__file__).parents[2]
_HELD = "held"
_KNOWN: dict[tuple[str, str], str] = {}
_STARTED: list[subprocess.Popen[bytes]] = []


def begin(parent: str | None = None) -> int:
    """Makes the folder of a session in ``parent``; returns the descriptor that holds its FIFO open."""
    os.environ[FOLDER] = tempfile.mkdtemp(prefix="hpc_train-warm-", dir=parent)
    held = Path(os.environ[FOLDER], _HELD)
    os.mkfifo(held)
    return os.open(held, os.O_RDWR)


def address(module: str, also: str, environment: Mapping[str, str]) -> str:
    """Returns the address of the server ``module`` that has imported the modules ``also``, and starts it with
    ``environment`` if there is none; both are separated by commas."""
    if FOLDER not in os.environ:
        begin()
    key = module, also
    if key not in _KNOWN:
        folder = Path(os.environ[FOLDER])
        socket = folder / f"{module}-{hashlib.sha256(also.encode()).hexdigest()[:8]}"
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not socket.exists():
                _start(module, str(socket), also, environment, folder / _HELD)
        _KNOWN[key] = str(socket)
    return _KNOWN[key]


def _start(module: str, socket: str, also: str, environment: Mapping[str, str], held: Path) -> None:
    with held.open("rb") as alive:
        server = subprocess.Popen(
            [sys.executable, "-m", f"tests.warm_parents.{module}", socket, also],
            cwd=REPOSITORY,
            env=environment,
            stdin=alive,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
    assert server.stdout is not None
    server.stdout.readline()  # it listens
    _STARTED.append(server)
