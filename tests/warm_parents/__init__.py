"""Forks the warm parents of the agents under test from a process that has imported torch.

An agent starts a warm parent, which imports torch for about four seconds of CPU time before it forks the workers. The
tests start some hundred agents, and this import was two thirds of their CPU time. In the environment that
``with_server`` returns, an agent gets its warm parent from ``server`` instead: the server, which has imported torch but
nothing of hpc_train, forks a process, and that process runs the command that the agent would have executed.
``sitecustomize`` redirects the agent and falls back to a new process if the server cannot reproduce it.

``run`` forks a command of the command line from the same server: without it, each command imports Hydra, and those that
read checkpoints or train import torch, for half a second to four seconds of CPU time.

The long forms, and the tests that inject faults into an agent and its processes, start warm parents as users do.
"""

from __future__ import annotations

import functools
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.warm_parents.sitecustomize import SOCKET, send, surroundings

HERE = Path(__file__).parent


def with_server(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns ``environment`` for agents that use the server of this process, which the first call starts."""
    if os.environ.get("HPC_TRAIN_LONG"):
        return dict(environment)
    path = os.pathsep.join([str(HERE), environment["PYTHONPATH"]] if "PYTHONPATH" in environment else [str(HERE)])
    return {**environment, "PYTHONPATH": path, SOCKET: _server()[0]}


@functools.cache
def _server() -> tuple[str, subprocess.Popen[bytes]]:
    """Starts the server; returns the address of its socket and the process, which ends with this one."""
    address = f"{tempfile.mkdtemp(prefix='hpc_train-warm-')}/warm_parents"
    command = [sys.executable, "-m", "tests.warm_parents.server", address]
    return address, subprocess.Popen(command, cwd=HERE.parents[1], stdin=subprocess.PIPE, start_new_session=True)


def run(
    module: str, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str] | None:
    """Runs ``python -m MODULE ARGUMENTS`` in a process that the server forks; returns None if the server cannot.

    The process has a session of its own and the environment and working directory that are given.

    Raises:
        subprocess.TimeoutExpired: it took longer than ``timeout`` seconds; it and its session have been killed.
    """
    if SOCKET not in environment:
        return None
    request = {
        "python": sys.executable,
        "surroundings": surroundings(environment),
        "module": module,
        "arguments": list(arguments),
        "descriptors": [0, 1, 2, 3],
        "search_path": [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part],
        "no_bytecode": sys.dont_write_bytecode,
        "directory": str(cwd.resolve()),
        "environment": dict(environment),
    }
    status, told = os.pipe()
    with (
        open(status, "rb") as ends,  # noqa: PTH123
        open(os.devnull, "rb") as nothing,  # noqa: PTH123
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        pid = send(environment[SOCKET], request, [nothing.fileno(), out.fileno(), err.fileno(), told])
        os.close(told)
        if pid is None:
            return None
        if not select.select([ends], [], [], timeout)[0]:
            os.killpg(pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired([module, *arguments], timeout)
        code = int(ends.read() or -signal.SIGKILL)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess([module, *arguments], code, *texts)
