"""Starts the warm parents of the agents under test from a process that has torch imported already.

An agent starts a warm parent, which imports torch for four seconds of CPU time before it forks the workers. The tests
start some hundred agents, and that import was two thirds of their CPU time. ``variables`` returns the environment in
which an agent gets its warm parent from ``server`` instead: the server forks a process that has torch imported, and
nothing of hpc_train, and the process then runs the command line that the agent would have executed. ``sitecustomize``
redirects the agent; it leaves alone what the server cannot reproduce. ``make test-all`` and all tests that kill
processes start their warm parents as users do.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.warm_parents.sitecustomize import SOCKET

HERE = Path(__file__).parent


def variables() -> dict[str, str]:
    """Returns the variables of agents that use the server, which the first call starts."""
    if os.environ.get("HPC_TRAIN_LONG") == "1":
        return {}
    return {SOCKET: _server()}


@functools.cache
def _server() -> str:
    """Starts the server and returns its socket. The server ends with this process, which holds its standard input."""
    address = f"{tempfile.mkdtemp(prefix='hpc_train-tests-')}/warm_parents"
    subprocess.Popen(
        [sys.executable, "-m", "tests.warm_parents.server", address],
        cwd=HERE.parents[1],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    return address
