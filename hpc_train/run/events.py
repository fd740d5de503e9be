"""The event log of a run: one file per writing process and attempt.

No two processes share a file, because two clients of a network file system that append to one file lose lines.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import append_text, line_end

EVENTS = (
    "submitted",
    "started",
    "resumed",
    "checkpoint_saved",
    "checkpoint_failed",
    "save_deferred",  # the final save waits for free disk space
    "checkpoint_set_aside",
    "checkpoint_archived",
    "archive_failed",
    "stop_requested",
    "worker_failed",
    "node_lost",
    "hang_detected",
    "suspended",  # after Slurm has resumed the job: the seconds during which its processes were stopped
    "paused",  # the batch host did not execute for some seconds, although the job was not suspended
    "gpu_memory_awaited",  # after an attempt that ran out of GPU memory
    "slow_step",  # a step so slow that its stacks were saved; nothing was killed
    "straggler",
    "preflight",
    "slow_node",
    "slow_gpu",
    "unfit_node",  # a node that the preflight dropped
    "restarted",
    "shrunk",
    "spare_used",
    "requeued",
    "requeued_by_slurm",  # requeued by a person or by Slurm itself
    "training_finished",  # by rank 0, with the time ledger; the agent then writes finished or stopped
    "training_stopped",
    "finished",
    "stopped",
    "failed",
    "stopped_retrying",
    "step_skipped",  # skipped on all ranks because the gradient was not finite
    "rolled_back",  # restored a checkpoint within the attempt, skipping some samples
    "first_step",  # of a restarted attempt or one that compiles: its seconds, and whether artifacts were loaded
    "pipeline_split",  # the layers of each stage, the cost of each block, and the predicted step time
    "compression_chosen",  # chosen by strategy.compression=auto, with the measurements
    "pipeline_balance",  # measured balance of the stages in the first steps
    "warning",
    "advice",
    "profiled",
    "bucket_size_chosen",
)


MAX_PENDING_LINES = 1000  # beyond this the oldest lines are dropped
RETRY_S = 0.2
CLOSE_TIMEOUT_S = 5.0  # for a file system that does not respond when the writer ends


class Unwritten:
    """The pending lines of one writer, kept until they are on disk, so that a failing file system does not end a run.

    The lines of a file keep their order. Any thread may use it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: deque[tuple[Path, str]] = deque()
        self._failing = False
        self._lost = 0

    def add(self, path: Path, line: str) -> None:
        with self._lock:
            self._lines.append((path, line))
            if len(self._lines) > MAX_PENDING_LINES:
                self._lines.popleft()
                self._lost += 1
            self._write()

    def write_all(self, seconds: float) -> None:
        """Tries to write for ``seconds``; lines that remain are lost."""
        until = time.monotonic() + seconds
        while self._lines and time.monotonic() < until:
            with self._lock:
                self._write()
            if self._lines:
                time.sleep(RETRY_S)
        if self._lines:
            _print(f"{len(self._lines)} lines of the event log are lost")

    def _write(self) -> None:
        failures: dict[Path, OSError] = {}
        left = deque[tuple[Path, str]]()
        for path, line in self._lines:
            if path not in failures:
                try:
                    if self._failing:  # a purge may have removed the empty directory
                        path.parent.mkdir(parents=True, exist_ok=True)
                    append_text(path, line_end(path) + line if self._failing else line)
                    continue
                except OSError as error:
                    failures[path] = error
            left.append((path, line))
        self._lines = left
        if bool(left) != self._failing:
            self._failing = bool(left)
            self._report_outage(next(iter(failures.values()), None))

    def _report_outage(self, failure: OSError | None) -> None:
        """Prints one line when an outage begins and one when it is over."""
        text = f"cannot write the event log; its lines are kept in memory until it is writable: {failure}"
        if failure is None:
            text = "the event log is writable again; the lines kept in memory are written"
            text += f" except for the first {self._lost}, which are lost" if self._lost else ""
            self._lost = 0
        _print(text)


def _print(text: str) -> None:
    with suppress(OSError):  # stderr is closed
        print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class EventLog:
    """Appends events of one writer (``submitter``, ``agent-<node>``, ``rank-0003``) in one attempt.

    Lines that cannot be written stay in memory and are written before the next event or by ``close``.
    """

    path: Path
    attempt: int
    rank: int | None = None
    _unwritten: Unwritten = field(default_factory=Unwritten, compare=False, repr=False)

    @classmethod
    def open(cls, run: RunDirectory, writer: str, attempt: int, rank: int | None = None) -> EventLog:
        with suppress(OSError):
            run.events.mkdir(parents=True, exist_ok=True)
        return cls(run.events_file(writer, attempt), attempt, rank)

    def of(self, attempt: int) -> EventLog:
        """Returns the log of the same writer in another attempt; both share the pending lines."""
        writer = self.path.name.rpartition("-")[0]
        return replace(self, path=self.path.with_name(f"{writer}-{attempt:03d}.jsonl"), attempt=attempt)

    def close(self) -> None:
        """Writes the pending lines; waits a few seconds for a file system that does not respond."""
        self._unwritten.write_all(CLOSE_TIMEOUT_S)

    def write(self, event: str, *, step: int | None = None, **details: Any) -> None:
        """Appends an event with time, node, rank, attempt and step. A failing file system does not raise."""
        if event not in EVENTS:
            raise ValueError(f"unknown event {event!r}")
        head = {"time": time.time(), "event": event, "rank": self.rank, "node": socket.gethostname()}
        event_line = head | {"attempt": self.attempt, "step": step} | details
        self._unwritten.add(self.path, json.dumps(event_line, separators=(",", ":")) + "\n")
