"""Holds all ranks between two steps while a person looks into the process of one of them with pdb (``debug``).

The ranks agree on the step (``Control``), so no collective is pending while they wait, and no timeout of a process
group passes. Their heartbeats show ``Phase.HELD``, for which hang detection has a separate bound. They learn from the
store of the attempt that the hold is over.

The debugger listens on a Unix socket in the directory of multiprocessing's sockets, which only the user may enter, and
serves one connection of the same user. A timer interrupts it, and the statement that it executes, when the hold ends.
"""

from __future__ import annotations

import os
import pdb
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.util import get_temp_dir
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from hpc_train.run.agent_worker import Heartbeat, Phase, SharedBlock, WorkerSpec
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.files import read_or
from hpc_train.run.processes import is_peer_of_same_user
from hpc_train.run.requests import MOST_HOLD_S, HoldRequest, StopFlag, hold_requested, withdraw_hold
from hpc_train.units import format_duration

POLL_S = 0.2
CONNECT_S = 60.0  # for srun, which connects from another node, to start a step
STORE_S = 30.0


class Holds:
    """Holds the ranks of an attempt; ``ask`` belongs to each message of ``Control``, and ``hold`` is collective."""

    def __init__(
        self, run: RunDirectory, spec: WorkerSpec, stop: StopFlag, heartbeat: Heartbeat, events: EventLog
    ) -> None:
        self._run = run
        self._spec = spec
        self._stop = stop
        self._heartbeat = heartbeat
        self._events = events
        self._block = None if spec.heartbeat is None else SharedBlock(spec.heartbeat)
        self._answered = 0.0  # the time of the newest request that was answered
        self._asks = False
        self._count = 0

    def ask(self) -> bool:
        """Returns whether a person wants to look into this rank."""
        self._asks = self._block is not None and self._block.hold_requested > self._answered
        return self._asks

    def hold(self, ranks: int, step: int, frame: FrameType | None) -> None:
        """Waits until ``ranks`` ranks have been looked at, this one if it has asked for it; ends early on a stop
        request.

        Args:
            step: the number of completed steps.
            frame: where the debugger begins.
        """
        self._count += 1
        server = dist.TCPStore(
            self._spec.master_address,
            self._spec.master_port,
            timeout=timedelta(seconds=STORE_S),
            wait_for_workers=False,
        )
        store = dist.PrefixStore(f"{self._spec.store_prefix}/hold-{self._count}", server)
        with self._heartbeat.during(Phase.HELD, step):
            until = time.monotonic() + MOST_HOLD_S
            if self._asks and self._block is not None:
                self._asks = False
                self._answered = self._block.hold_requested
                request = read_or(lambda: hold_requested(self._run), None)  # None if the person has given up
                if request is not None and request.rank == self._spec.rank:
                    self._serve(request, store, step, frame)
                store.add("looked", 1)
            while store.add("looked", 0) < ranks and time.monotonic() < until:
                if self._stop.requested:
                    store.add("stop", 1)
                time.sleep(POLL_S)

    def _serve(self, request: HoldRequest, store: dist.Store, step: int, frame: FrameType | None) -> None:
        began = time.monotonic()
        until = began + min(request.limit_s, MOST_HOLD_S)
        node = os.environ.get("SLURMD_NODENAME", socket.gethostname())
        head: dict[str, Any] = {"step": step, "node": node, "requested": request.time}
        limit = format_duration(request.limit_s)
        reason = ""

        def is_asked_to_stop() -> bool:
            return self._stop.requested or store.add("stop", 0) > 0

        def end_of(connection: socket.socket) -> str:
            """Returns why the hold ends; empty if it does not."""
            if time.monotonic() > until:
                return f"its limit of {limit} has passed"
            if is_asked_to_stop():
                return "the run was asked to stop"
            with suppress(BlockingIOError):
                if not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    return "the debugger has gone"
            return ""

        try:
            with listening(Path(get_temp_dir()) / f"debug-{self._spec.rank}-{self._count}") as listener:
                message = f"rank {request.rank} on {node} is held after step {step} for at most {limit}; all ranks wait"
                path = str(listener.getsockname())
                self._events.write("held", path=path, message=message, **head)
                connection = accept(listener, min(until, began + CONNECT_S), is_asked_to_stop)
            with connection:
                reason = look(connection, frame, message, lambda: end_of(connection))
        except OSError as error:  # no connection, or it broke
            reason = str(error)
        seconds = round(time.monotonic() - began, 3)
        self._events.write("released", seconds=seconds, reason=reason, **head)
        with suppress(OSError):
            withdraw_hold(self._run)


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """Listens on a Unix socket with mode 0600 at ``path``, whose directory only the user may enter.

    Raises:
        PermissionError: other users may enter the directory, or it belongs to one.
    """
    folder = path.parent.stat()
    if folder.st_mode & 0o077 or folder.st_uid != os.geteuid():
        raise PermissionError(f"other users may enter {path.parent}")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        try:
            path.chmod(0o600)
            listener.listen(1)
            yield listener
        finally:
            path.unlink(missing_ok=True)


def accept(listener: socket.socket, until: float, gives_up: Callable[[], bool]) -> socket.socket:
    """Returns the first connection of the same user; those of other users are closed.

    Args:
        until: the time on the monotonic clock at which it raises TimeoutError.
        gives_up: called a few times per second; True also raises TimeoutError.
    """
    listener.settimeout(POLL_S)
    while time.monotonic() < until and not gives_up():
        with suppress(TimeoutError):
            connection, _ = listener.accept()
            if is_peer_of_same_user(connection):
                connection.settimeout(None)
                return connection
            connection.close()
    raise TimeoutError("no debugger has connected")


class HeldDebugger(pdb.Pdb):
    """Looks at the variables of a frame. Commands that execute further lines of the run are refused, because the other
    ranks would not follow."""

    def _end(self, argument: str) -> bool:
        return True

    def _refuse(self, argument: str) -> None:
        self.error("all ranks are held between two steps; `continue` ends the hold")

    do_continue = do_c = do_cont = do_quit = do_q = do_exit = do_EOF = _end  # type: ignore[assignment]
    do_step = do_s = do_next = do_n = do_until = do_unt = do_return = do_r = do_jump = do_j = _refuse  # type: ignore[assignment]
    do_break = do_b = do_tbreak = do_run = do_restart = do_debug = do_interact = _refuse  # type: ignore[assignment]


def look(connection: socket.socket, frame: FrameType | None, head: str, end: Callable[[], str]) -> str:
    """Lets the person at the other end of ``connection`` look at ``frame``; returns why that ends.

    Args:
        head: the first line that the person sees.
        end: called a few times per second, also while a statement of the person runs. A text that is not empty ends the
            hold for this reason.

    Raises:
        OSError: the connection broke.
    """
    typed = connection.makefile("r", encoding="utf-8", errors="replace")  # one file for both would lose lines
    shown = connection.makefile("w", encoding="utf-8", errors="replace")
    debugger = HeldDebugger(stdin=typed, stdout=shown, nosigint=True, readrc=False)
    debugger.prompt = "(held) "
    inside = pdb.Pdb.interaction.__code__

    def interrupt(number: int, interrupted: FrameType | None) -> None:
        while interrupted is not None and interrupted.f_code is not inside:
            interrupted = interrupted.f_back
        if interrupted is not None and (reason := end()):  # pdb reports the error of a statement and goes on
            raise _Over(reason)

    before = signal.signal(signal.SIGALRM, interrupt)
    reason = "the debugger was left"
    try:
        print(head, file=shown, flush=True)
        signal.setitimer(signal.ITIMER_REAL, POLL_S, POLL_S)
        debugger.reset()
        debugger.interaction(frame, None)
    except _Over as over:
        reason = str(over)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with suppress(OSError):
        print(f"the hold is over: {reason}", file=shown, flush=True)
    return reason


class _Over(Exception):
    """Raised where the debugger is when the hold ends."""
