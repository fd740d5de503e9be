"""Implements the tracking process, which sends the metrics of a run to its trackers while the run trains.

The agent of node 0 starts one for all attempts of its job (``tracking.TrackingProcess``) and reports the end to it in
one line on standard input. Each tracker has a thread, so that one that hangs does not delay the others; after an error
it is given up with one message. The process has a low priority, and the kernel kills it with the agent.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.machine.temporary import TRACKING, TemporaryDirectory
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.files import read_or
from hpc_train.run.freeze import load
from hpc_train.run.processes import die_with_parent
from hpc_train.search_path import shadowing_file
from hpc_train.telemetry.sinks.replay import BACKENDS, Replay
from hpc_train.telemetry.sinks.tracker import Session
from hpc_train.telemetry.sinks.tracking import advice, tracking_events, wanted

FIRST_EVERY_S = 1.0  # the interval until there is a line
EVERY_S = 5.0
LOW_PRIORITY = 10  # a tenth of a core that ranks keep busy: W&B starts in seconds, and with 19 it took minutes


@dataclass(frozen=True)
class Order:
    """Tells the tracking process that the job ends.

    Attributes:
        seconds: the time limit for sending the remaining metrics.
        checkpoint: the directory of the newest checkpoint; None uploads nothing.
    """

    seconds: float
    checkpoint: str | None = None


class Follower:
    """Sends a run to one tracker, in a thread, until ``end``. ``record`` is called with the name of the tracker and its
    outcome whenever this changes."""

    def __init__(self, replay: Replay, notify: Callable[[str], object], record: Callable[[str, Any], object]) -> None:
        self._replay = replay
        self._notify = notify
        self._record = record
        self._outcome: dict[str, Any] = {}
        self._problem: str | None = None
        self.end = threading.Event()  # set when no line follows
        self._thread = threading.Thread(target=self._work, name=replay.backend.name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, until: float, limit_s: float) -> None:
        """Waits until everything is sent, at most until ``until`` (time.monotonic())."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self.give_up(f"it did not finish in {limit_s:g} s")

    def give_up(self, reason: str) -> None:
        """Reports once that the tracker does not get the remaining metrics."""
        if self._problem is None:
            self._problem = reason
            backend = self._replay.backend
            self._notify(
                f"{backend.label}: {reason}; continuing without it. {advice(self._replay.run, [backend.name])}"
            )
            self._report()

    def _work(self) -> None:
        try:
            while not self.end.wait(EVERY_S if self._replay.is_open else FIRST_EVERY_S):
                self._replay.send_new()
                self._report()
            self._replay.send_new()
            self._replay.finish()
            self._report()
        except BaseException as error:  # errors of clients derive from several bases, SystemExit among them
            shadowed = shadowing_file(error)
            self.give_up(shadowed.replace("\n  ", "; ") if shadowed else f"{type(error).__name__}: {error}")

    def _report(self) -> None:
        outcome = self._replay.backend.outcome()
        if self._problem is not None:
            outcome["problem"] = self._problem
        if outcome != self._outcome and (self._replay.is_open or self._problem):
            self._outcome = outcome
            self._record(self._replay.backend.name, outcome)


def main(arguments: list[str]) -> None:
    """Follows a run until the agent reports the end; never returns. ``arguments`` are the run directory, the first
    attempt of the job, and the process id of the agent."""
    path, first_attempt, agent = arguments
    die_with_parent(int(agent))
    before = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, LOW_PRIORITY)
    folder = TemporaryDirectory.make(TRACKING, Path(tempfile.gettempdir()))
    tempfile.tempdir = str(folder.path)  # W&B makes directories that only exit handlers remove
    run = RunDirectory(Path(path))
    events = tracking_events(run)
    orders: list[Order] = []
    followers = list(_followers(run, int(first_attempt), events, orders))
    for follower in followers:
        follower.start()
    orders.append(Order(**json.loads(sys.stdin.readline())))  # the kernel kills this process if the agent dies
    _end(followers, orders[0].seconds, before)
    events.close()
    folder.remove()
    os._exit(0)  # threads may hang


def _followers(run: RunDirectory, first_attempt: int, events: EventLog, orders: list[Order]) -> Iterator[Follower]:
    def notify(message: str) -> None:
        events.of(max(first_attempt, read_or(run.newest_attempt, 0))).write("warning", message=message)

    def checkpoint() -> Path | None:
        if orders and orders[0].checkpoint is not None:
            return Path(orders[0].checkpoint)
        return None

    def record(name: str, outcome: Any) -> None:
        events.record(run, **{name: outcome})

    config = load(run)
    session = Session(config, run, notify, first_attempt, checkpoint)
    for name in wanted(config.telemetry, run):
        try:
            backend = BACKENDS[name](session)
        except Exception as error:  # its package is missing
            notify(f"{error}; continuing without it. {advice(run, [name])}")
        else:
            yield Follower(Replay(run, backend), notify, record)


def _end(followers: list[Follower], seconds: float, priority: int) -> None:
    """Sends the remaining metrics in at most ``seconds``, with the priority of the agent if the limits allow it."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, int(thread.name), priority)
    until = time.monotonic() + seconds
    for follower in followers:
        follower.end.set()
    for follower in followers:
        follower.join(until, seconds)


if __name__ == "__main__":
    main(sys.argv[1:])
