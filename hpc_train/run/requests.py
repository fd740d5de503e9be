"""The flag that a signal sets and nothing else does: no work is done inside a signal handler.

A wish to see the stacks of a live run: a file in the run directory that its agents look at every few seconds.

logs/stacks/request            the number of the last wish
logs/stacks/NNN-<node>.txt     the answer of a node

Signals at the agent: each is only noted; the agent's loop acts on the note.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import write_text


class StopFlag:
    """Says whether this process was asked to stop, and why. Written by a signal handler, read once per step."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.since = 0.0  # time.monotonic() of the first request

    @property
    def requested(self) -> bool:
        return self.reason is not None

    def request(self, reason: str) -> None:
        """The first reason stays."""
        if self.reason is None:
            self.reason, self.since = reason, time.monotonic()


def request_stacks(run: RunDirectory) -> int:
    """Asks the agents of ``run``; returns the number of the wish."""
    _folder(run).mkdir(parents=True, exist_ok=True)
    number = stacks_requested(run) + 1
    write_text(_folder(run) / "request", f"{number}\n")
    return number


def stacks_requested(run: RunDirectory) -> int:
    """The number of the last wish, 0 before the first."""
    try:
        return int((_folder(run) / "request").read_text())
    except (OSError, ValueError):
        return 0


def answer_stacks_request(run: RunDirectory, number: int, node: str, text: str) -> None:
    _folder(run).mkdir(parents=True, exist_ok=True)
    write_text(_folder(run) / f"{number:03d}-{node}.txt", text)


def stacks_answers(run: RunDirectory, number: int) -> list[Path]:
    return sorted(_folder(run).glob(f"{number:03d}-*.txt"))


def _folder(run: RunDirectory) -> Path:
    return run.logs / "stacks"


STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)
ECHO_S = 0.3  # some wrappers pass on a Ctrl-C that the terminal has sent to the whole group already


class StopRequests:
    """Whether this agent was asked to stop, by which signal and when.

    A second SIGINT raises KeyboardInterrupt wherever the agent is, also inside a blocking call.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.since = 0.0  # time.monotonic() of the first request
        self._interrupted: float | None = None

    @property
    def requested(self) -> bool:
        return self.reason is not None

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT:
            if self._interrupted is not None and now - self._interrupted > ECHO_S:
                raise KeyboardInterrupt
            self._interrupted = self._interrupted or now
        self.request(signal.Signals(number).name)

    def request(self, reason: str) -> None:
        """Notes a stop, unless one is noted already."""
        if self.reason is None:
            self.reason, self.since = reason, time.monotonic()


@contextmanager
def watch_signals() -> Iterator[StopRequests]:
    """Notes stop signals inside the ``with`` block; afterwards the handlers are as before."""
    requests = StopRequests()
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number, handler in before.items():
        if not (number == signal.SIGHUP and handler == signal.SIG_IGN):  # nohup stays nohup
            signal.signal(number, requests.on_signal)
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
