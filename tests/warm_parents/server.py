"""Imports torch, and forks a process for each request.

An agent asks for the command line of a forkserver, and a test for ``python -m MODULE ARGUMENTS``.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import pickle
import random
import resource
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import types
from pathlib import Path
from typing import Any

from tests.warm_parents.sitecustomize import SOCKET, surroundings

BEGIN = next(number for number, path in enumerate(sys.path) if path.endswith(".zip"))  # python311.zip
INSTALLED = sys.path[BEGIN:]  # after the working directory and PYTHONPATH


def main(address: str) -> None:
    """Serves until standard input is closed."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    own = sys.executable, surroundings()
    import_torch()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forked processes
    while sys.stdin.buffer not in (ready := select.select([listener, sys.stdin.buffer], [], [])[0]):
        assert ready == [listener]
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError, EOFError):  # the agent was killed meanwhile
            answer(connection, listener, own)
    shutil.rmtree(Path(address).parent)


def import_torch() -> None:
    """Imports what the warm parents of all agents and the commands import, other than hpc_train itself."""
    gc.disable()
    for name in ("hydra.core.override_parser.overrides_parser", "omegaconf", "psutil", "rich.console", "submitit"):
        importlib.import_module(name)
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel
    import torch.nn.parallel  # noqa: F401

    gc.freeze()  # forked processes share the memory, as long as no collector writes to it


def answer(connection: socket.socket, listener: socket.socket, own: tuple[str, Any]) -> None:
    """Forks the process that a request asks for and sends its pid; sends 0 if a fork cannot equal a new process."""
    request, descriptors = receive(connection)
    try:
        same = (request["python"], request["surroundings"]) == own
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
        if "module" in request:
            os._exit(supervise(request))
        exec(request["command"], sys.modules["__main__"].__dict__)
    except SystemExit:
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    os._exit(1)


def supervise(request: dict[str, Any]) -> int:
    """Forks the process of ``python -m MODULE ARGUMENTS`` and writes its exit code, when it ends, to descriptor 3."""
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        os.write(3, str(os.waitstatus_to_exitcode(status)).encode())
        return 0
    os.close(3)
    sys.orig_argv[:] = [sys.executable, "-m", request["module"], *request["arguments"]]
    sys.argv[:] = ["-m", *request["arguments"]]
    sys.path.insert(0, request["directory"])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream is sys.stderr)  # type: ignore[union-attr]
    code = run_module(request["module"])
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def run_module(name: str) -> int:
    """Runs a module as ``python -m`` does and returns the exit code."""
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return int(end.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Gives this process the descriptors, limits, variables and paths that a child of the agent would have."""
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
    sys.path[:] = request["search_path"] + (INSTALLED if "module" in request else [])
    sys.path_importer_cache.clear()
    tempfile.tempdir = None  # it may be that of the server's environment
    sys.argv[:] = ["-c"]
    sys.dont_write_bytecode = request["no_bytecode"]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    sys.modules["__main__"] = types.ModuleType("__main__")
    random.seed()
    gc.enable()
    with contextlib.suppress(ImportError):
        importlib.import_module("sitecustomize")


if __name__ == "__main__":
    os.environ.pop(SOCKET, None)
    main(sys.argv[1])
