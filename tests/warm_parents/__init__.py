"""Forks the warm parents of the agents under test from a process that has imported torch.

An agent starts a warm parent, which imports torch for about four seconds of CPU time before it forks the workers. The
tests start some hundred agents, and this import was two thirds of their CPU time. In the environment that
``with_server`` returns, an agent gets its warm parent from ``server`` instead: the server, which has imported torch and
what the workers need of hpc_train, forks a process, and that process runs the command that the agent would have
executed. Tests of models of Hugging Face have a server of their own, which has imported transformers too.
``sitecustomize`` redirects the agent and falls back to a new process if the server cannot reproduce it. ``commands``
does the same for the commands that the tests call.

The long forms, and the tests that inject faults into an agent and its processes, start warm parents as users do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.warm_parents import shared
from tests.warm_parents.sitecustomize import SOCKET

HERE = Path(__file__).parent
HUGGING_FACE = ("transformers.models.llama.modeling_llama", "peft")


def with_server(environment: Mapping[str, str], also: Sequence[str] = ()) -> dict[str, str]:
    """Returns ``environment`` for agents that use the server of this session, which the first call starts.

    Args:
        also: modules that the server imports besides, if they are installed.
    """
    if os.environ.get("HPC_TRAIN_LONG"):
        return dict(environment)
    path = os.pathsep.join([str(HERE), environment["PYTHONPATH"]] if "PYTHONPATH" in environment else [str(HERE)])
    room = {**os.environ, "TESTS_ROOM": "." * 65536}  # for the environments of the processes that the server forks
    address = shared.address("server", ",".join(also), room)
    return {**environment, "PYTHONPATH": path, SOCKET: address}
