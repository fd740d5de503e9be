"""Imports torch and the workers, and forks a process that runs the command line of a forkserver for each request."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import random
import resource
import select
import shutil
import signal
import socket
import sys
import types
from pathlib import Path
from typing import Any

from tests.warm_parents.sitecustomize import JOINABLE, SOCKET, surroundings

REPOSITORY = Path(__file__).parents[2]


def main(address: str, also: str) -> None:
    """Serves until standard input is closed; ``also`` names modules to import besides, separated by commas."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    print(flush=True)
    own = sys.executable, surroundings()
    import_modules(also)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forked processes
    while sys.stdin.buffer not in (ready := select.select([listener, sys.stdin.buffer], [], [])[0]):
        assert ready == [listener]
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError, EOFError):  # the agent was killed meanwhile
            answer(connection, listener, own)
    shutil.rmtree(Path(address).parent, ignore_errors=True)  # another server may have done it


def import_modules(also: str) -> None:
    """Imports what the warm parents of agents import, but for a module that switches the collector off."""
    gc.disable()
    import torch._dynamo
    import torch._inductor.compile_fx
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel
    import torch.nn.parallel  # noqa: F401

    import hpc_train.elastic.rendezvous.store
    import hpc_train.elastic.worker_process
    import hpc_train.parallel.pipeline.engine
    import hpc_train.train.worker  # noqa: F401

    for name in filter(None, also.split(",")):
        with contextlib.suppress(ImportError):  # an extra that is not installed
            importlib.import_module(name)
    gc.freeze()  # forked processes share the memory, as long as no collector writes to it


def finds_this_code(request: dict[str, Any]) -> bool:
    """Returns whether the process would import hpc_train from here, and not a snapshot or a copy."""
    folders = (Path(request["directory"], entry) for entry in request["search_path"])
    return next((folder for folder in folders if (folder / "hpc_train" / "__init__.py").exists()), None) == REPOSITORY


def answer(connection: socket.socket, listener: socket.socket, own: tuple[str, Any]) -> None:
    """Forks the process that a request asks for and sends its pid; sends 0 if a fork cannot equal a new process."""
    request, descriptors = receive(connection)
    try:
        same = (request["python"], request["surroundings"]) == own and finds_this_code(request)
        pid = fork(request, descriptors, [connection, listener]) if same else 0
    finally:
        close(descriptors)
    connection.sendall(pid.to_bytes(8, "big"))


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    length, descriptors, _, _ = socket.recv_fds(connection, 8, 16)
    data = bytearray()
    while len(data) < int.from_bytes(length, "big"):
        more = connection.recv(1 << 20)
        if not more:
            close(descriptors)
            raise EOFError
        data += more
    return pickle.loads(data), descriptors


def close(descriptors: list[int]) -> None:
    for each in descriptors:
        os.close(each)


def fork(request: dict[str, Any], descriptors: list[int], own: list[socket.socket]) -> int:
    """Returns the pid of a process that runs the request's command."""
    pid = os.fork()
    if pid:
        return pid
    try:
        for each in own:
            each.close()
        become(request, descriptors)
        exec(request["command"], sys.modules["__main__"].__dict__)
    except SystemExit:
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    os._exit(1)


def become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Gives this process what a child of the agent would have: namespaces, descriptors, limits, variables and paths."""
    join_namespaces(request["pid"])
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    above = max(*request["descriptors"], *descriptors) + 1
    high = [os.dup2(each, above + number) for number, each in enumerate(descriptors)]
    os.closerange(3, above)
    for source, target in zip(high, request["descriptors"], strict=True):
        os.dup2(source, target)
        os.close(source)
    os.chdir(request["directory"])
    os.umask(request["umask"])
    os.sched_setaffinity(0, os.sched_getaffinity(request["pid"]))
    for name in ("RLIMIT_NOFILE", "RLIMIT_CORE", "RLIMIT_AS", "RLIMIT_FSIZE", "RLIMIT_MEMLOCK", "RLIMIT_STACK"):
        limit = getattr(resource, name)
        resource.setrlimit(limit, resource.prlimit(request["pid"], limit))
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    os.environ.clear()
    os.environ.update(request["environment"])
    show_environment()
    sys.path[:] = request["search_path"]
    sys.argv[:] = ["-c"]
    sys.dont_write_bytecode = request["no_bytecode"]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    sys.modules["__main__"] = types.ModuleType("__main__")
    random.seed()
    gc.enable()
    with contextlib.suppress(ImportError):
        importlib.import_module("sitecustomize")


def show_environment() -> None:
    """Makes ``/proc/PID/environ`` show the environment, as that of a new process, where the server has the room.

    The strings of the server's own environment, which nothing refers to any more, are overwritten.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start and env_end, see proc_pid_stat(5)
    text = b"".join(b"%s=%s\0" % item for item in os.environb.items())
    if len(text) < end - start:
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def join_namespaces(pid: int) -> None:
    """Enters the namespaces of ``pid``; the nodes of a cluster with a network have a namespace of their own each."""
    for kind in JOINABLE:
        theirs = f"/proc/{pid}/ns/{kind}"
        if os.readlink(theirs) == os.readlink(f"/proc/self/ns/{kind}"):  # noqa: PTH115
            continue
        with open(theirs) as namespace:  # noqa: PTH123
            if ctypes.CDLL(None).setns(namespace.fileno(), 0):
                raise OSError(f"cannot enter {theirs}")


if __name__ == "__main__":
    os.environ.pop(SOCKET, None)
    main(*sys.argv[1:])
