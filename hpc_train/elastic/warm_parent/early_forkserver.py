"""Runs a head start: imports torch, waits for an agent, and becomes the forkserver that the agent starts.

It runs as a script and does not import hpc_train, since the run may have a frozen copy of it. It ends at once when the
command that started it ends or closes its pipe, even in the middle of an import: the kernel then sends SIGIO.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import importlib.machinery
import io
import os
import pickle
import resource
import select
import signal
import socket
import sys
import types
from collections.abc import Sequence
from typing import Any

# what the modules of workers import besides hpc_train
MODULES = ("torch", "torch.distributed.checkpoint", "psutil", "yaml")
MOST_DESCRIPTORS = 16


def main(channel: int, life: int) -> None:
    """Runs until the agent ends, or the command ends before there is an agent.

    Args:
        channel: a socket through which the request of the agent comes.
        life: the read end of a pipe whose other end the command holds.
    """
    _end_with(life)
    _close_others({0, 1, 2, channel, life})
    gc.disable()
    with contextlib.redirect_stderr(io.StringIO()) as said:  # a command that is refused prints only the refusal
        complete = _import_all()
    with socket.socket(fileno=channel) as connection:
        request, descriptors = _receive(connection)
    os.close(life)
    free = _place(descriptors, request["descriptors"])
    os.chdir(request["directory"])
    os.umask(request["umask"])
    resource.setrlimit(resource.RLIMIT_NOFILE, request["open_files"])
    before = sys.path[:]
    sys.path[:] = request["search_path"]
    if not (complete and free and (sys.path == before or _finds_the_same())):
        os.execve(sys.executable, request["arguments"], request["environment"])  # as if there were no head start
    sys.stderr.write(said.getvalue())
    _become(request)


def _end_with(life: int) -> None:
    """Makes the kernel end this process with SIGIO when the other end of the pipe ``life`` is closed."""
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([life], [], [], 0)[0]:  # it was closed before
        os._exit(1)


def _close_others(retained: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - pathlib is not imported yet
        if int(name) not in retained:
            with contextlib.suppress(OSError):  # the descriptor of the listing
                os.close(int(name))


def _import_all() -> bool:
    """Returns whether all modules were imported; a forkserver ignores those that are missing."""
    try:
        for name in MODULES:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    except Exception:  # the forkserver will show it
        return False
    return True


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Returns the agent's request and its descriptors; exits if the command has ended."""
    length, descriptors, _, _ = socket.recv_fds(connection, 8, MOST_DESCRIPTORS)
    data = bytearray()
    while not length or len(data) < int.from_bytes(length, "big"):
        more = connection.recv(1 << 20) if length else b""
        if not more:
            os._exit(1)
        data += more
    return pickle.loads(data), descriptors


def _place(descriptors: Sequence[int], numbers: Sequence[int]) -> bool:
    """Gives the ``descriptors`` the ``numbers`` that they have in the agent; returns whether these were free."""
    above = max(*numbers, *descriptors) + 1
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    free = not {*map(str, numbers)} & {*os.listdir("/proc/self/fd")}  # noqa: PTH208
    for source, target in zip(high, numbers, strict=True):
        os.dup2(source, target)
        os.close(source)
    return free


def _finds_the_same() -> bool:
    """Returns whether a new process with this search path would import the same files, and not those of frozen code."""
    importlib.invalidate_caches()
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if spec is None or "." in name or not spec.has_location:
            continue
        current = importlib.machinery.PathFinder.find_spec(name)
        if current is None or current.origin != spec.origin:
            return False
    return True


def _become(request: dict[str, Any]) -> None:
    """Runs the command of a process that the agent would have started."""
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[:] = ["-c"]
    main_module = types.ModuleType("__main__")
    sys.modules |= {"__main__": main_module, "__mp_main__": main_module}  # the import of multiprocessing set the latter
    exec(request["arguments"][-1], main_module.__dict__)


if __name__ == "__main__":
    if not sys.flags.safe_path:
        sys.path[0] = ""  # that of `python -c`, instead of the folder of this file
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    main(*map(int, sys.argv[1:]))
