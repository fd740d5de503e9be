"""Python imports this module at its start: it makes ``multiprocessing`` ask the server of the tests for forkservers.

The address of the server is in the environment. The forkserver is started as usual if the server cannot reproduce it,
i.e. with another interpreter, user or option, or with variables that torch reads when it is imported.
"""

from __future__ import annotations

import gc
import os
import sys

TYPE_CHECKING = False  # each process of a test imports this: without typing
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

SOCKET = "TESTS_WARM_PARENTS"
STARTS = "TESTS_STARTS"  # names the file of a test session with a line for each start of an agent
READ_BY_IMPORTS = ("OMP_", "MKL_", "KMP_", "TORCH", "PYTORCH", "LD_", "PYTHONHASHSEED")
# A worker sets its number of threads before its first operation, and torch looks for the folder when it compiles.
SET_LATER = ("OMP_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR")
JOINABLE = ("net", "uts", "mnt")  # namespaces that a process of root can enter


def surroundings(environment: Mapping[str, str] = os.environ) -> tuple[int, list[str], dict[str, str]]:
    """Returns what a fork cannot change: the user, the namespaces, and the variables that imports read."""
    kinds = ("pid", "user") if os.getuid() == 0 else ("pid", "user", *JOINABLE)
    namespaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in kinds]  # noqa: PTH115
    read = {n: value for n, value in environment.items() if n.startswith(READ_BY_IMPORTS) and n not in SET_LATER}
    return os.getuid(), namespaces, read


def redirect(server: Callable[[], str | None]) -> None:
    """Makes the standard library ask a server for its forkserver, if ``server`` returns the address of one."""
    from multiprocessing import forkserver, util

    start, ensure_running = util.spawnv_passfds, forkserver.ForkServer.ensure_running
    after_variables = list(sys.path)  # before Python adds the script's folder
    forked: set[int] = set()

    def start_or_ask(path: str, arguments: list[str], descriptors: list[int]) -> int:
        command = arguments[-1]
        if command.startswith("from multiprocessing.forkserver") and arguments[1:-1] in (["-c"], ["-B", "-c"]):
            # an agent that uses frozen code has changed the variables
            first = [""] * ("PYTHONSAFEPATH" not in os.environ)
            first += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
            address = server()
            pid = address and ask(address, path, command, descriptors, [*first, *after_variables])
            if pid:
                forked.add(pid)
                return pid
        return start(path, arguments, descriptors)

    def ensure_started(self) -> None:  # type: ignore[no-untyped-def]
        if self._forkserver_pid in forked:  # not a child of this process, which os.waitpid takes for granted
            if is_alive(self._forkserver_pid):
                return
            os.close(self._forkserver_alive_fd)
            self._forkserver_address = self._forkserver_alive_fd = self._forkserver_pid = None
        ensure_running(self)

    util.spawnv_passfds = start_or_ask
    forkserver.ForkServer.ensure_running = ensure_started
    forkserver.ensure_running = forkserver._forkserver.ensure_running


def of_agents() -> str:
    """Returns the address of the server, and counts the first call of each process."""
    if os.getpid() not in _COUNTED:  # an agent may start its warm parent again
        _COUNTED.add(os.getpid())
        count_start()
    return os.environ[SOCKET]


_COUNTED: set[int] = set()


def omit_head_start() -> None:
    """Starts no forkserver early: the server has imported torch."""
    spawn = os.posix_spawn

    def spawn_others(path: str, words: list[str], environment: Mapping[str, str], **options: Any) -> int:
        if any(word.endswith("early_forkserver.py") for word in words):
            raise OSError("the server has imported torch: nothing needs a head start")
        return spawn(path, words, environment, **options)

    os.posix_spawn = spawn_others  # type: ignore[assignment]


def count_start() -> None:
    """Notes that an agent starts its warm parent."""
    try:
        with open(os.environ.get(STARTS, os.devnull), "a") as file:  # noqa: PTH123 - without pathlib
            file.write(os.environ.get("PYTEST_CURRENT_TEST", "") + "\n")
    except OSError:  # after the end of the test session
        pass


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123 - each process of a test imports this: without pathlib
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def ask(address: str, python: str, command: str, descriptors: list[int], search_path: list[str]) -> int | None:
    """Returns the pid of the process that the server forked to run ``command``; None if it did not."""
    request = {
        "python": os.fsdecode(python),
        "surroundings": surroundings(),
        "command": command,
        "descriptors": [0, 1, 2, *descriptors],
        "search_path": search_path,
        "no_bytecode": sys.dont_write_bytecode,
        "directory": os.getcwd(),  # noqa: PTH109
        "environment": dict(os.environ),
    }
    return send(address, request, [0, 1, 2, *descriptors])


def send(address: str, request: dict[str, Any], descriptors: list[int]) -> int | None:
    """Sends a request with ``descriptors``, in the order of those of the request; returns the pid, or None."""
    import pickle
    import signal
    import socket

    mask = os.umask(0)
    os.umask(mask)
    blocked = [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
    data = pickle.dumps({**request, "umask": mask, "blocked": blocked, "pid": os.getpid()})
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(address)
            socket.send_fds(connection, [len(data).to_bytes(8, "big")], descriptors)
            connection.sendall(data)
            return int.from_bytes(connection.recv(8), "big") or None
    except OSError:
        return None


if SOCKET in os.environ and __name__ == "sitecustomize":
    redirect(of_agents)
    omit_head_start()
    # The collector runs seldom: with the usual 700 it takes a sixth of an import of torch, in which it finds nothing.
    gc.set_threshold(100_000)
