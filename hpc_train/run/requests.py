"""Handles requests to a run: stop requests, which arrive as signals, and requests for stack dumps, for another number
of nodes or to hold a rank, which are files.

A signal handler only sets a flag; the main loop acts on it. ``logs/stacks/request`` holds the number of the newest
request for stacks, ``attempts/resize.json`` the newest request for another number of nodes, and ``attempts/hold.json``
the newest request to hold a rank, until the hold ends. The agent of node 0 polls them, and the rendezvous server
notifies the others, because thousands of nodes that poll a file would keep a shared file system busy. Each agent writes
its stacks to ``logs/stacks/NNN-<node>.txt``.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Generic, TypeVar

from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import BackgroundCall, write_json, write_text
from hpc_train.run.rows import check_fields

Request = TypeVar("Request")
TimedRequest = TypeVar("TimedRequest", "ResizeRequest", "HoldRequest")


class StopFlag:
    """Records whether this process was asked to stop, and why. A signal handler sets it; training reads it once per
    step.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.since = 0.0  # time.monotonic() of the first request

    @property
    def requested(self) -> bool:
        return self.reason is not None

    def request(self, reason: str) -> None:
        """Requests a stop; later requests do not change the reason."""
        if self.reason is None:
            self.reason = reason
            self.since = time.monotonic()


def record_stop_request(run: RunDirectory, by: str = "cancel") -> None:
    """Records in ``run.json`` that a user stops the job: an agent that is still starting cannot record its end."""
    with suppress(OSError):  # a full disk does not keep the job from being stopped
        now = max(time.time(), _submitted(run.record()))  # even if the clock was set back meanwhile
        run.update_record(stop_requested=now, stop_requested_by=by)


def stop_was_requested(run: RunDirectory) -> bool:
    """Returns whether a user has stopped the newest submission of ``run``; each new one resets it."""
    record = run.record()
    requested: float = record.get("stop_requested", 0.0)
    return requested > 0 and requested >= _submitted(record)


def _submitted(record: Mapping[str, Any]) -> float:
    """Returns when the newest submission was made, in seconds since 1970; 0 without one."""
    submitted: float = (record.get("submissions") or [{}])[-1].get("time", 0.0)
    return submitted


def request_stacks(run: RunDirectory) -> int:
    """Asks the agents of ``run`` for stack dumps; returns the number of the request."""
    _folder(run).mkdir(parents=True, exist_ok=True)
    number = stacks_requested(run) + 1
    write_text(_folder(run) / "request", f"{number}\n")
    return number


def stacks_requested(run: RunDirectory) -> int:
    """Returns the number of the newest request for stacks, 0 before the first."""
    try:
        return int(run.read(_folder(run) / "request"))
    except (OSError, ValueError):
        return 0


@dataclass(frozen=True)
class ResizeRequest:
    """Asks a live run to continue on another number of nodes.

    Attributes:
        nodes: the nodes that train; ``elastic.spares`` come in addition.
        reason: who asks, or why, as events and ``why`` show it.
        time: seconds since 1970.
        of_user: whether a user asks, and not the run itself.
    """

    nodes: int
    reason: str
    time: float
    of_user: bool = True


def request_resize(run: RunDirectory, nodes: int, reason: str, *, of_user: bool = True) -> ResizeRequest:
    """Asks the agent of node 0 to continue ``run`` on ``nodes`` nodes; a later request replaces an earlier one.

    The agent accepts or refuses the request and writes the event ``resize_requested`` or ``resize_refused``.
    """
    request = ResizeRequest(nodes, reason, max(time.time(), _submitted(run.record())), of_user)
    write_json(_resize_file(run), asdict(request))
    return request


def resize_requested(run: RunDirectory) -> ResizeRequest | None:
    """Returns the newest request to resize ``run``; None if the newest submission of the run has none."""
    return _newest_request(run, _resize_file(run), ResizeRequest)


MOST_HOLD_S = 3600.0


@dataclass(frozen=True)
class HoldRequest:
    """Asks all ranks of a live run to wait between two steps while a person looks into the process of ``rank``.

    Attributes:
        limit_s: the longest time that they wait, in seconds.
        time: seconds since 1970; no two requests have the same.
    """

    rank: int
    limit_s: float
    time: float


def request_hold(run: RunDirectory, rank: int, limit_s: float) -> HoldRequest:
    """Asks the agents of ``run`` to hold ``rank``; the rank answers with the event ``held``."""
    request = HoldRequest(rank, limit_s, max(time.time(), _submitted(run.record())))
    write_json(_hold_file(run), asdict(request))
    return request


def hold_requested(run: RunDirectory) -> HoldRequest | None:
    """Returns the newest request to hold a rank; None if the newest submission of the run has none, or it is over."""
    return _newest_request(run, _hold_file(run), HoldRequest)


def withdraw_hold(run: RunDirectory) -> None:
    """Removes the request to hold a rank. A hold that has begun ends by itself."""
    _hold_file(run).unlink(missing_ok=True)


def _hold_file(run: RunDirectory) -> Path:
    return run.attempts / "hold.json"


def _newest_request(run: RunDirectory, path: Path, kind: Callable[..., TimedRequest]) -> TimedRequest | None:
    if path not in set(run.attempts.glob(path.name)):  # a network file system caches the absence of a name
        return None
    try:
        request = kind(**run.json(path))
        check_fields(request)
    except (TypeError, ValueError):  # another version, or not a file of hpc_train
        return None
    return request if request.time >= _submitted(run.record()) else None


def _resize_file(run: RunDirectory) -> Path:
    return run.attempts / "resize.json"


REQUESTS_EVERY_S = 2.0
REQUEST_S = 1.0  # the agent waits at most this long for the file system to show whether there is a request


class NewRequests(Generic[Request]):
    """Finds new requests; used by the agent of node 0 only.

    Args:
        read: returns the newest request.
        newest: the newest request that is not new.
    """

    def __init__(self, read: Callable[[], Request], newest: Request) -> None:
        self._reading = BackgroundCall(read)
        self._newest = newest
        self._next_look = 0.0

    def new(self, now: float) -> Request | None:
        """Returns a new request at time ``now``; None if there is none or it is too early to look."""
        if now < self._next_look:
            return None
        self._next_look = now + REQUESTS_EVERY_S
        try:
            request = self._reading.poll(REQUEST_S)
        except OSError:  # the file system fails or hangs, so no request can be read
            return None
        if request == self._newest:
            return None
        self._newest = request
        return request


def answer_stacks_request(run: RunDirectory, number: int, node: str, text: str) -> None:
    """Writes the stacks of ``node`` as the answer to request ``number``."""
    _folder(run).mkdir(exist_ok=True)
    write_text(_folder(run) / f"{number:03d}-{node}.txt", text)


def stacks_answers(run: RunDirectory, number: int) -> list[Path]:
    """Returns the files with the answers to request ``number``."""
    return sorted(_folder(run).glob(f"{number:03d}-*.txt"))


def _folder(run: RunDirectory) -> Path:
    return run.logs / "stacks"


STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)
# besides USR2, the signals that a batch script may request before its time limit; the others come from a terminal
ANNOUNCING = (signal.SIGUSR1.name, signal.SIGTERM.name)
DUPLICATE_SIGINT_S = 0.3  # some wrappers forward a Ctrl-C that the terminal already sent to the whole group


class StopRequests(StopFlag):
    """Records whether this agent was asked to stop, by which signal and when.

    A second SIGINT raises KeyboardInterrupt wherever the agent is, even inside a blocking call.
    """

    def __init__(self) -> None:
        super().__init__()
        self._interrupted: float | None = None

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT:
            if self._interrupted is not None and now - self._interrupted > DUPLICATE_SIGINT_S:
                raise KeyboardInterrupt
            self._interrupted = self._interrupted or now
        self.request(signal.Signals(number).name)


@contextmanager
def watch_signals() -> Iterator[StopRequests]:
    """Records stop signals inside the ``with`` block; the previous handlers are restored afterwards.

    A SIGTERM that was blocked until now, because this process was starting, is recorded as well.
    """
    requests = StopRequests()
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number, handler in before.items():
        if not (number == signal.SIGHUP and handler == signal.SIG_IGN):  # keep the effect of nohup
            signal.signal(number, requests.on_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
