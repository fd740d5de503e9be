"""Starts the import of torch as the first thing that a command does, while it composes and checks its config.

The import takes as long as all the work before the agent, and the two are independent. Once the agent starts its warm
parent, ``early_forkserver``, which has been importing since, becomes it, with the variables and the search path that
the agent has prepared. A new process is started instead if the two would differ, because variables that torch reads
have changed or frozen code has other modules. If the command is rejected, the process ends.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpc_train.search_path import safe_path

PROGRAM = Path(__file__).with_name("early_forkserver.py")
# These are blocked in the warm parent, and in each worker until its handlers are installed, so that a signal to the
# process group (Ctrl-C, scancel) neither kills an import nor gets lost.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
IMPORTS = "HPC_TRAIN_WARM_IMPORTS"  # in the environment of the warm parent: the modules that it imports
THREADS = "OMP_NUM_THREADS"  # OpenBLAS, which numpy imports, reads it when it is loaded


@dataclass
class HeadStart:
    """Holds a process that imports torch until an agent needs it. The command ends it with ``end``.

    Attributes:
        python: the interpreter and its options.
        environment: the variables of the process.
    """

    python: Sequence[str]
    environment: Mapping[str, str]
    _pid: int | None
    _channel: socket.socket
    _life: int | None  # open until the process no longer ends with this one, at the latest at the end of the command

    @classmethod
    def begin(cls, threads: int) -> HeadStart | None:
        """Starts the process; returns None if the system has no room for it.

        Args:
            threads: those that a worker will probably have; the head start is lost if it has another number.
        """
        python = [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
        environment = {THREADS: str(threads), **os.environ, **safe_path()}
        try:
            agent_socket, channel = socket.socketpair()
            life, held = os.pipe()
        except OSError:
            return None
        with channel:
            try:
                for descriptor in (channel.fileno(), life):
                    os.set_inheritable(descriptor, True)
                words = [*python, str(PROGRAM), str(channel.fileno()), str(life)]
                pid = os.posix_spawn(sys.executable, words, environment, setsigmask=SIGNALS)
            except OSError:
                agent_socket.close()
                os.close(held)
                return None
            finally:
                os.close(life)
        return cls(python, environment, pid, agent_socket, held)

    def end(self) -> None:
        """Ends the process, unless it has become the warm parent of an agent, which ends it."""
        if self._pid is not None:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        self._pid = None
        self._channel.close()
        if self._life is not None:
            os.close(self._life)
        self._life = None

    @contextmanager
    def becomes_forkserver(self) -> Iterator[None]:
        """Lets ``multiprocessing`` use the process for the forkserver that it starts inside the ``with`` block."""
        from multiprocessing import util  # the command has no time for it before the process runs

        start = util.spawnv_passfds

        def hand_over(path: str | bytes, arguments: Sequence[str | bytes], descriptors: Sequence[int]) -> int:
            words = [os.fsdecode(word) for word in arguments]
            is_forkserver = words[-1].startswith("from multiprocessing.forkserver")  # not the resource tracker
            pid = self._hand_over(words, descriptors) if is_forkserver else None
            return start(path, arguments, descriptors) if pid is None else pid  # type: ignore[arg-type]

        util.spawnv_passfds = hand_over  # type: ignore[assignment]
        try:
            yield
        finally:
            util.spawnv_passfds = start

    def _hand_over(self, arguments: list[str], descriptors: Sequence[int]) -> int | None:
        """Sends the command of the forkserver; returns its pid, or None after the end of the head start."""
        if self._pid is None or arguments[:-2] != [*self.python] or not _same_for_imports(self.environment):
            self.end()
            return None
        mask = os.umask(0)
        os.umask(mask)
        request = {
            "arguments": arguments,
            "descriptors": list(descriptors),
            "directory": os.getcwd(),  # noqa: PTH109 - it is sent as text
            "environment": dict(os.environ),
            "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
            "search_path": [*sys.path],
            "umask": mask,
        }
        data = pickle.dumps(request)
        try:
            socket.send_fds(self._channel, [len(data).to_bytes(8, "big")], descriptors)
            self._channel.sendall(data)
        except OSError:  # it was killed
            self.end()
            return None
        pid = self._pid
        self._pid = None
        return pid


def _same_for_imports(environment: Mapping[str, str]) -> bool:
    """Returns whether the variables that modules may read when they are imported still have these values."""
    from hpc_train.machine.environment import OF_CACHES

    later = {"HYDRA_FULL_ERROR", IMPORTS, "PYTHONPATH", "PYTHONSAFEPATH", *OF_CACHES}
    now = os.environ
    return all(now.get(name) == environment.get(name) for name in {*now, *environment} - later)


@contextmanager
def head_start(threads: int | None) -> Iterator[HeadStart | None]:
    """Yields a head start, which ends with the ``with`` block; yields None if ``threads`` is None."""
    begun = None if threads is None else HeadStart.begin(threads)
    try:
        yield begun
    finally:
        if begun is not None:
            begun.end()
