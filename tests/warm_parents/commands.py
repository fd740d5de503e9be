"""Runs commands of hpc_train in processes that are forked from one that has imported hpc_train.

A command imports Hydra, rich and hpc_train and registers the schema for a second of CPU time, which is most of what it
takes, and the tests run hundreds of commands. The server has done this, and has imported no torch; a second one, for
the commands that need it, has imported torch too. For each request a server forks a process, which runs
``hpc_train/__main__.py`` as ``python -m hpc_train`` does, in the directory and the environment of the request.

``run`` returns None where the server cannot reproduce a new process. The long forms start commands as users do.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.warm_parents import shared
from tests.warm_parents.server import become, close, receive
from tests.warm_parents.shared import REPOSITORY
from tests.warm_parents.sitecustomize import SOCKET, surroundings

IMPORTED = (
    "hpc_train.cli",
    "hpc_train.commands.train",
    "hpc_train.commands.batch",
    "hpc_train.commands.submitted",
    "hpc_train.commands.agent",
    "hpc_train.elastic.agent",
    "hpc_train.launch.executors.local",
    "hydra._internal.logging_config",
)
NEED_TORCH = ("bench", "checkpoint", "evaluate", "generate")
READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG")  # variables that Python reads when it starts
BYTES = 8  # of each number that the server sends


def run(
    arguments: Sequence[str], cwd: Path, environment: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str] | None:
    """Runs a command as ``subprocess.run`` does, with its output captured.

    Raises:
        subprocess.TimeoutExpired: it took longer than ``timeout`` seconds, and was killed.
    """
    if SOCKET not in environment:  # also in the long forms
        return None
    deadline = time.monotonic() + timeout
    with socket.socket(socket.AF_UNIX) as connection:
        outputs = _Output(), _Output()
        pid = _ask(connection, _request(cwd, arguments, environment), [output.write for output in outputs])
        for output in outputs:
            output.begin()
        if not pid:
            return None
        try:
            connection.settimeout(timeout)
            code = connection.recv(BYTES)
            assert code, "the server was killed"
            texts = [output.read(deadline) for output in outputs]
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(["hpc_train", *arguments], timeout) from None
    return subprocess.CompletedProcess(["hpc_train", *arguments], int.from_bytes(code, "big", signed=True), *texts)


class _Output:
    """A pipe that a thread reads until all processes that hold its other end have closed it."""

    def __init__(self) -> None:
        self._read, self.write = os.pipe()
        self._text = ""
        self._thread = threading.Thread(target=self._collect, daemon=True)

    def begin(self) -> None:
        os.close(self.write)
        self._thread.start()

    def _collect(self) -> None:
        with open(self._read, encoding="utf-8") as pipe:  # noqa: PTH123
            self._text = pipe.read()

    def read(self, deadline: float) -> str:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            raise TimeoutError
        return self._text


def _request(cwd: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    status = Path("/proc/self/status").read_text()  # os.umask would change it, for other threads too
    return {
        "python": sys.executable,
        "surroundings": surroundings(environment),
        "at_start": _at_start(environment),
        "arguments": list(arguments),
        "descriptors": [0, 1, 2],
        "search_path": [],  # the server completes it
        "no_bytecode": sys.dont_write_bytecode,
        "directory": str(cwd.resolve()),
        "environment": dict(environment),
        "umask": int(status.partition("Umask:")[2].split()[0], 8),
        "blocked": [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "pid": os.getpid(),
    }


def _at_start(environment: Mapping[str, str]) -> dict[str, str]:
    names = (name for name in environment if name.startswith(READ_AT_START) and name != "PYTHONPATH")
    return {name: environment[name] for name in names}


def added_paths(environment: Mapping[str, str]) -> list[str] | None:
    """Returns the directories that ``environment`` has before the PYTHONPATH of this process.

    Returns None if its PYTHONPATH does not end with that of this process, or a directory replaces what it has imported.
    """
    path, own = environment.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")
    added = path.removesuffix(own).split(os.pathsep)
    if not path.endswith(own) or added.pop():
        return None
    replaced = any(Path(each, name).exists() for each in added for name in ("hpc_train", "hydra_plugins"))
    return None if replaced else added


def _ask(connection: socket.socket, request: dict[str, Any], writes: list[int]) -> int:
    """Returns the pid of the process that the server forked for ``request``; 0 if it did not."""
    data = pickle.dumps(request)
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        connection.connect(_address(request["environment"], request["arguments"][:1]))
        socket.send_fds(connection, [len(data).to_bytes(8, "big")], [nothing, *writes])
        connection.sendall(data)
        return int.from_bytes(connection.recv(BYTES), "big")
    except OSError:
        return 0
    finally:
        os.close(nothing)


def _address(environment: Mapping[str, str], command_name: Sequence[str]) -> str:
    """Returns the address of the server for a command, which the first call starts. It ends with the session."""
    common = {name: value for name, value in environment.items() if not name.startswith((*READ_AT_START, "SLURM_CONF"))}
    path = os.pathsep.join([str(Path(__file__).parent), str(REPOSITORY)])
    modules = "torch.distributed.checkpoint" if {*command_name} & {*NEED_TORCH} else ""
    return shared.address("commands", modules, common | _at_start(os.environ) | {"PYTHONPATH": path})


def main(address: str, modules: str) -> None:
    """Serves until standard input is closed. Returns in a forked process as well, which has run its command."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    print(flush=True)
    own = sys.executable, surroundings(), _at_start(os.environ)
    search_path = sys.path[1:]
    gc.disable()  # the imports take a sixth less time; ``become`` switches it on again
    for name in (*IMPORTED, *filter(None, modules.split(","))):
        with contextlib.suppress(ImportError):  # an extra that is not installed
            importlib.import_module(name)
    fill_caches()
    assert modules or "torch" not in sys.modules
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forked processes
    while sys.stdin.buffer not in (ready := select.select([listener, sys.stdin.buffer], [], [])[0]):
        assert ready == [listener]
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError, EOFError):  # the test was killed meanwhile
            request, descriptors = receive(connection)
            same = (request["python"], request["surroundings"], request["at_start"]) == own
            added = added_paths(request["environment"])
            if not same or added is None:
                connection.sendall(bytes(BYTES))
            elif os.fork() == 0:
                listener.close()
                _fork_and_report(connection, descriptors)
                connection.close()
                request["search_path"] = [request["directory"], *added, *search_path]
                if any(Path(each, "sitecustomize.py").exists() for each in added):
                    sys.modules.pop("sitecustomize", None)  # ``become`` imports the added one
                break
            close(descriptors)
    else:
        shutil.rmtree(Path(address).parent, ignore_errors=True)  # another server may have done it
        return
    become(request, descriptors)
    sys.argv[:] = ["hpc_train", *request["arguments"]]
    runpy.run_module("hpc_train", run_name="__main__", alter_sys=True)


def fill_caches() -> None:
    """Registers the schema, and fills the caches of Hydra and OmegaConf; nothing in them depends on the environment."""
    from hpc_train.config.compose import compose, typed
    from hpc_train.launch.request import register_launcher
    from tests.config.reading import read_once

    read_once()
    register_launcher()
    typed(compose(["+strategy=dp", "data=synthetic", "optim.lr=1e-3", "run.name=name"]))


def _fork_and_report(connection: socket.socket, descriptors: list[int]) -> None:
    """Returns in a forked process; this one sends its pid and exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if not pid:
        return
    close(descriptors)
    with contextlib.suppress(OSError):
        connection.sendall(pid.to_bytes(BYTES, "big"))
        _, status = os.waitpid(pid, 0)
        connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(BYTES, "big", signed=True))
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
