"""Calls ``run.on_event``, a command of the user, for the events that the agent of the first node records.

A thread calls it, one event after the other, so that it delays neither the event log nor a restart. At its end the
agent waits a few seconds for the calls that are left. The batch script calls the command if no agent is left to record
how the job ended.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from hpc_train.run.directory import RUN_DIRECTORY, RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.events import Event
from hpc_train.run.files import read_or

KEY = "run.on_event"
CALL_S = 10.0  # for one event, and for all that are left when the agent ends
LAST_S = 1.0  # for the thread to note that its last call was killed

# what the agent of another node passes on: the state of its node, and the end of a job that has lost the first node
OF_OTHER_NODES = frozenset({"gpu_idle", "node_lost", "requeued", "stopped_retrying", "failed"})


@contextmanager
def calling(command: str | None, run: RunDirectory, events: EventLog, is_first: bool) -> Iterator[EventLog]:
    """Yields a log whose events are passed to ``command``; ``events`` itself if there is none.

    Args:
        is_first: whether this is the agent of the first node, which passes on all of its events.
    """
    if command is None:
        yield events
        return
    calls = EventCalls(command, run, events)
    try:
        yield events.heard_by(lambda event: calls.add(event) if is_first or event.name in OF_OTHER_NODES else None)
    finally:
        calls.close()


class EventCalls:
    """Calls a command for each event, in order. A call that fails is a warning in the event log, once per reason."""

    def __init__(self, command: str, run: RunDirectory, events: EventLog) -> None:
        self._command = command
        self._run = run
        self._events = events
        self._queue: queue.Queue[Event | None] = queue.Queue()
        self._problems: set[str] = set()
        self._until = float("inf")
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._work, name="on_event", daemon=True)
        self._thread.start()

    def add(self, event: Event) -> None:
        """Calls the command soon. Does not wait."""
        self._queue.put(event)

    def close(self) -> None:
        """Waits for the calls that are left, ``CALL_S`` seconds at most."""
        self._until = time.monotonic() + CALL_S
        self._queue.put(None)
        self._thread.join(CALL_S)
        self._kill()  # the call began before the end
        self._thread.join(LAST_S)

    def _work(self) -> None:
        while (event := self._queue.get()) is not None:
            left_s = min(CALL_S, self._until - time.monotonic())
            if left_s <= 0:
                return
            problem = self._call(event, left_s)
            if problem is not None and problem not in self._problems:
                self._problems.add(problem)
                log = self._events.of(max(0, read_or(self._run.newest_attempt, 0)))
                log.write("warning", message=f"{KEY} failed for the event {event.name}: {problem}")

    def _call(self, event: Event, limit_s: float) -> str | None:
        """Returns why the command has failed; None if it succeeds."""
        environment = {**os.environ, RUN_DIRECTORY: str(self._run.path)}
        try:
            process = self._process = subprocess.Popen(
                ["bash", "-c", self._command],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=environment,
                start_new_session=True,
            )
            _, error = process.communicate(json.dumps(event) + "\n", timeout=limit_s)
        except subprocess.TimeoutExpired:
            return f"it did not end within {CALL_S:g} s"
        except OSError as refused:
            return f"it cannot be started: {refused}"
        finally:
            self._kill()
        if process.returncode == 0:
            return None
        lines = error.strip().splitlines()
        return lines[-1] if lines else f"exit code {process.returncode}"

    def _kill(self) -> None:
        """Kills the process of the current call, and what it has left running."""
        process = self._process
        self._process = None  # its number may become that of another process
        if process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
