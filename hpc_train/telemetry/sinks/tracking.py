"""Starts the tracking process of a job and limits the time that it takes to end. The agent of node 0 uses it.

Ranks do not communicate with trackers: rank 0 appends to the files in ``metrics/`` and ``texts/``, and the process
follows them (see ``follow.py``). Training continues even if the process fails.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from hpc_train.config.schema import Config, TelemetryConfig
from hpc_train.opening import open_to_append
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.files import read_or
from hpc_train.run.requests import STOP_SIGNALS
from hpc_train.search_path import safe_path
from hpc_train.telemetry.sinks.wandb import requested_mode

TRACKING = "tracking"  # the name of its writer in the event log
FOLLOW = "hpc_train.telemetry.sinks.follow"
FINISH_S = 30.0
ARTIFACT_S = 240.0  # including the upload of a checkpoint; the rendezvous server waits for it, see FILES_S there
STOPPED_S = 10.0  # for a job that stops early: its time may run out, and the next job sends the remaining metrics
MARGIN_S = 5.0  # for the process to report which tracker did not finish


def wanted(telemetry: TelemetryConfig, run: RunDirectory) -> list[str]:
    """Returns the names of the trackers that the config, or WANDB_MODE, requests for a run."""
    enabled = {
        "tensorboard": telemetry.tensorboard,
        "wandb": requested_mode(telemetry.wandb.mode, run.record().get("wandb")) != "disabled",
        "mlflow": telemetry.mlflow.uri is not None,
    }
    return [name for name, is_enabled in enabled.items() if is_enabled]


def advice(run: RunDirectory, names: Sequence[str]) -> str:
    """Returns how to send the missing metrics to the trackers."""
    commands = " and ".join(f"python -m hpc_train sync {run.path} --to {name}" for name in names)
    return f"The metrics are in {run.metrics}; the next job of the run sends them, or: {commands}"


class TrackingProcess:
    def __init__(self, run: RunDirectory, config: Config, names: Sequence[str]) -> None:
        self._run = run
        self._names = names
        self._uploads = config.telemetry.wandb.log_checkpoint and "wandb" in self._names
        self._ending = False
        self._process = self._started()
        self._watch = threading.Thread(target=self._wait, name="tracking", daemon=True)
        self._watch.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self, done: bool, checkpoint: Path | None) -> None:
        """Lets the process send the remaining metrics, in bounded time.

        Args:
            done: whether training is done.
            checkpoint: the newest checkpoint, which is uploaded if the config requests it and training is done.
        """
        limit_s = FINISH_S if done else STOPPED_S
        order: dict[str, Any] = {"seconds": limit_s}
        if self._uploads and done and checkpoint is not None:
            limit_s = ARTIFACT_S
            order = {"seconds": limit_s, "checkpoint": str(checkpoint)}
        self._ending = True
        with suppress(OSError):  # it has crashed
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.close()
        self._watch.join(limit_s + MARGIN_S)
        if self._watch.is_alive():
            self.kill()
            self._tell(f"the tracking process did not end in {limit_s:g} s and was killed")

    def kill(self) -> None:
        self._ending = True
        self._process.kill()

    def _started(self) -> subprocess.Popen[str]:
        """Starts the process with the job's stop signals blocked, since the agent handles them.

        The process of W&B that it starts inherits this.
        """
        folder = self._run.path / "tracking"
        folder.mkdir(exist_ok=True)
        first = read_or(self._run.newest_attempt, -1) + 1
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            with open_to_append(folder / "output.log", self._run.path) as log:
                return subprocess.Popen(
                    [sys.executable, "-m", FOLLOW, str(self._run.path), str(first), str(os.getpid())],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    text=True,
                    env={**os.environ, **safe_path()},
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _wait(self) -> None:
        code = self._process.wait()
        if not self._ending or code > 0:
            self._tell(f"the tracking process has ended with {code} (see {self._run.path / 'tracking/output.log'})")

    def _tell(self, message: str) -> None:
        _tell(self._run, f"{message}; continuing without it. {advice(self._run, self._names)}")


@contextmanager
def tracked(run: RunDirectory, config: Config) -> Iterator[TrackingProcess | None]:
    """Yields the tracking process; None if no tracker is requested, or if it cannot be started, which is reported."""
    process = None
    names = wanted(config.telemetry, run)
    if names:
        try:
            process = TrackingProcess(run, config, names)
        except OSError as error:
            _tell(run, f"the tracking process cannot be started: {error}. {advice(run, names)}")
    try:
        yield process
    finally:
        if process is not None:
            process.kill()


def _tell(run: RunDirectory, message: str) -> None:
    """Writes a warning to the events of the tracking process, which no longer lives."""
    with closing(tracking_events(run)) as events:
        events.write("warning", message=message)


def tracking_events(run: RunDirectory) -> EventLog:
    """Returns the log of the tracking process, which the console follows."""
    return EventLog.open(run, TRACKING, max(0, read_or(run.newest_attempt, 0)))
