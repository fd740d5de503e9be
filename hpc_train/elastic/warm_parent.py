"""The warm parent: a process that has imported torch and done nothing else, from which workers are forked.

It is the standard library's forkserver. A worker forked from it starts in milliseconds instead of seconds. It must run
no tensor operation: torch hangs in children of a parent that ever ran a parallel one.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.process import BaseProcess
from typing import Any

from hpc_train.run.parent_death import die_with_parent
from hpc_train.run.process_state import process_state

CONTEXT = multiprocessing.get_context("forkserver")
LONGEST_SOCKET = 107  # bytes in the name of a Unix socket, unix(7)
SOCKET_IN_TMPDIR = "/pymp-12345678/listener-12345678"  # what multiprocessing puts behind $TMPDIR
LOST = 255  # multiprocessing's exit code of a process whose forkserver has died

# Blocked in the warm parent and so at the birth of each worker, until the worker has its handlers: a signal to the
# whole process group (Ctrl-C, scancel) neither kills an import nor is it lost.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def start(preload: Sequence[str]) -> int:
    """Starts the warm parent with ``preload`` imported (in the background); returns its pid."""
    CONTEXT.set_forkserver_preload(list(preload))
    return ensure()


def ensure() -> int:
    """Starts it again where it was killed; returns its pid."""
    _keep_sockets_short()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        resource_tracker.ensure_running()  # leaves INT and TERM unblocked
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]


def _keep_sockets_short() -> None:
    """Sockets go under /tmp where those of $TMPDIR would have too long a name (mended in Python 3.14).

    The workers and their loaders inherit the choice.
    """
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if "tempdir" in config or len(os.fsencode(tempfile.gettempdir() + SOCKET_IN_TMPDIR)) <= LONGEST_SOCKET:
        return
    config["tempdir"] = tempfile.mkdtemp(prefix="pymp-", dir="/tmp")
    util.Finalize(None, shutil.rmtree, args=(config["tempdir"], True), exitpriority=-100)


def took_along(exit_code: int | None) -> bool:
    """Whether a process that ended with ``exit_code`` went with its warm parent.

    A dying parent closes its pipes before the kernel shows it as dead, so it is looked at for a second.
    """
    until = time.monotonic() + 1.0
    while exit_code == LOST and time.monotonic() < until:
        pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        if pid is None or process_state(pid) in ("", "Z"):
            return True
        time.sleep(0.02)
    return False


def fork(target: Callable[..., None], *args: Any) -> BaseProcess:
    """Forks a process that calls ``target(*args)``; waits for the imports of the warm parent if it must."""
    process = CONTEXT.Process(target=target, args=args, daemon=False)
    process.start()
    return process


def die_with(warm_parent: int) -> None:
    """Called first in a forked process: the kernel kills it when the warm parent dies, which dies with the agent.

    The warm parent ends when nobody holds the write end of its pipe any more. Forked processes inherit that end, and
    close it here: only the agent is to hold it.
    """
    die_with_parent(warm_parent)
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]


def unblock_signals() -> None:
    """Lets the signals in that came since the fork; called once handlers are installed."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
