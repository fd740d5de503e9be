"""Signals at the agent: each is only noted; the agent's loop acts on the note."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

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
