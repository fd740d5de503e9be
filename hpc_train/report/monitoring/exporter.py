"""Exports the metrics of a live run to the monitoring of a site: to a file, at an HTTP endpoint and through OTLP.

It works in the agent of node 0, in separate threads. The agent outlives the workers, and no step waits for it: the
metrics come from the files of the run directory.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol, TypeVar

from hpc_train.config.schema import TelemetryConfig
from hpc_train.errors import UserError
from hpc_train.machine.allocation import Allocation
from hpc_train.report.monitoring.metrics import RUN_LABELS, Identity, RunReader, Snapshot
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.telemetry.sinks.tracker import name_of
from hpc_train.users import own_name

CLOSE_S = 10.0  # the time limit of the last snapshot; a file system may hang


class Exit(Protocol):
    """Interface of an export of the metrics. All calls come from one thread, which waits for them."""

    def publish(self, snapshot: Snapshot) -> None:
        """Exports a snapshot. Raises OSError if the snapshot cannot be written; the caller tries again with the next
        one."""

    def close(self) -> None:
        """Ends the export in bounded time, after the last snapshot."""


Opener = Callable[[], Exit]
Result = TypeVar("Result")


@contextmanager
def monitored(run: RunDirectory, config: TelemetryConfig, allocation: Allocation, events: EventLog) -> Iterator[None]:
    """Exports ``run`` as ``telemetry.prometheus`` and ``telemetry.otlp`` request. Problems never raise: they are
    reported as warnings. Only the agent of node 0 calls it. ``events`` is the log in which problems are reported; it
    also records the address in ``run.json``."""
    identity = identity_of(run, allocation)
    openers = list(_openers(run, config, allocation, events, identity))
    if not openers:
        yield
        return
    exporter = Exporter(RunReader(run, identity), openers, config.prometheus.interval_s, partial(_notify, events))
    exporter.start()
    try:
        yield
    finally:
        exporter.close(CLOSE_S)


def identity_of(run: RunDirectory, allocation: Allocation) -> Identity:
    run_id = str(run.record().get("run_id") or run.path.name)
    labels = dict(zip(RUN_LABELS, (name_of(run), run_id, own_name()), strict=True))
    partition = os.environ.get("SLURM_JOB_PARTITION", "")
    return Identity(labels, allocation.job_id or "", partition, allocation.node_name)


def _openers(
    run: RunDirectory, config: TelemetryConfig, allocation: Allocation, events: EventLog, identity: Identity
) -> Iterator[Opener]:
    run_id = identity.labels["run_id"]
    settings = config.prometheus
    if settings.file is None and settings.port is None and not config.otlp:
        return
    from hpc_train.report.monitoring.exits import Endpoint, MetricsFile, Otlp  # needs an HTTP server; other runs do not

    if settings.file is not None:
        yield partial(MetricsFile, settings.file, run, run_id)
    if settings.port is not None:
        yield partial(Endpoint, settings, allocation, run_id, partial(events.record, run))
    if config.otlp:
        yield partial(Otlp, identity.labels, partial(_notify, events))


class Exporter:
    """Reads a snapshot every ``interval_s`` seconds and publishes it, in a thread.

    Args:
        openers: open the exports; an error of one does not affect the others.
        notify: called with a message when reading or publishing begins to fail.
    """

    def __init__(
        self, reader: RunReader, openers: list[Opener], interval_s: float, notify: Callable[[str], object]
    ) -> None:
        self._reader = reader
        self._openers = openers
        self._interval_s = interval_s
        self._notify = notify
        self._exits: list[Exit] = []
        self._failing: set[str] = set()  # the classes of the exports whose last call failed
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, name="monitoring", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, seconds: float) -> None:
        """Publishes a last snapshot and closes the exports, in at most ``seconds``."""
        self._end.set()
        self._thread.join(seconds)

    def _work(self) -> None:
        for opener in self._openers:
            try:
                self._exits.append(opener())
            except (OSError, UserError, ImportError) as error:
                self._notify(f"continuing without a part of the monitoring: {error}")
        self._publish()
        while not self._end.wait(self._interval_s):
            self._publish()
        self._publish()
        for exit in self._exits:
            self._try(exit, exit.close)

    def _publish(self) -> None:
        snapshot = self._try(self._reader, self._reader.read)
        if snapshot is not None:
            for exit in self._exits:
                self._try(exit, partial(exit.publish, snapshot))

    def _try(self, owner: object, call: Callable[[], Result]) -> Result | None:
        """Returns the result of ``call``; None after an error; only the first of consecutive errors is reported."""
        who = type(owner).__name__
        try:
            result = call()
        except Exception as error:  # a defect of the monitoring must not end the run
            if who not in self._failing:
                self._notify(f"the monitoring fails and is retried: {type(error).__name__}: {error}")
            self._failing.add(who)
            return None
        self._failing.discard(who)
        return result


def _notify(events: EventLog, message: str) -> None:
    print(message, file=sys.stderr, flush=True)
    events.write("warning", message=message)
