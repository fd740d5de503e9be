"""Runs the key-value store of an attempt, through which the ranks rendezvous, in a process that outlives any single
worker.

Each attempt has its own store, on its own port, which is bound before it is published.
"""

from __future__ import annotations

import importlib
import signal
import socket
import time
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

from hpc_train.elastic.worker_process import (
    crash_of,
    die_with_warm_parent,
    died_with_warm_parent,
    ensure_warm_parent,
    fork_process,
)
from hpc_train.machine.allocation import LOOPBACK

if TYPE_CHECKING:
    from torch.distributed import TCPStore


ALL_INTERFACES = "0.0.0.0"
PATIENCE_S = 5.0  # retries while the warm parent dies


class Stores:
    """Runs the stores of a job's attempts, one at a time.

    The rendezvous server ``offer``s the listening socket of an attempt, and its agent calls ``serve``: forking waits
    for the imports of the warm parent, and the server must never wait.

    Args:
        entry: the store's entry point, as "module:function"; it returns an object that serves as long as it lives.
            None: the ranks start a store themselves at the port, which is given free for them.
    """

    def __init__(self, entry: str | None) -> None:
        self._entry = entry
        self._offered: dict[int, socket.socket] = {}
        self._process: BaseProcess | None = None
        self._lost_at_start = False

    def offer(self, attempt: int, listener: socket.socket) -> None:
        if self._entry is None:
            listener.close()
        else:
            self._offered[attempt] = listener

    def serve(self, attempt: int) -> None:
        """Starts the store of ``attempt`` and stops the previous one."""
        self.stop()
        if self._entry is None:
            return
        with self._offered.pop(attempt) as listener:
            self._process = self._fork(listener)
        self._lost_at_start = self._process is None

    def _fork(self, listener: socket.socket) -> BaseProcess | None:
        """Returns the store's process; None if the warm parent crashes, or dies repeatedly. Its death is not visible at
        once.
        """
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            warm_parent = ensure_warm_parent()
            try:
                return fork_process(_main, warm_parent, listener, self._entry)
            except (EOFError, ConnectionError):
                if crash_of(warm_parent) is not None:
                    return None
                time.sleep(0.02)
        return None

    @property
    def lost(self) -> bool:
        """Returns whether the store was killed or failed to start."""
        return self._lost_at_start or (self._process is not None and self._process.exitcode is not None)

    @property
    def warm_parent_died(self) -> bool:
        return self._process is not None and died_with_warm_parent(self._process.exitcode)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None
        self._lost_at_start = False


def _main(warm_parent_pid: int, listener: socket.socket, entry: str) -> None:
    """Runs the store. Signals stay blocked as in the warm parent, because the agent handles a Ctrl-C."""
    from hpc_train.elastic.warm_parent.imports import failure  # the warm parent has imported it, and agents must not

    die_with_warm_parent(warm_parent_pid)
    while failure is not None:  # the workers report it
        signal.pause()
    module, function = entry.split(":")
    served = getattr(importlib.import_module(module), function)(listener)
    while served is not None:
        signal.pause()


def serve(listener: socket.socket) -> TCPStore:
    """Serves on ``listener`` as long as the returned object lives."""
    from torch.distributed import TCPStore  # the agent imports this module and must not import torch

    host, port = listener.getsockname()
    address = LOOPBACK if host == ALL_INTERFACES else host
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
