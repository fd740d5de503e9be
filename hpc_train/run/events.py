"""The event log: what happened in a run, one file per writing process and attempt.

Two clients of a network file system that append to one file lose lines, so no two processes share one.
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
    "save_waits",  # the last one, for room on the disk
    "checkpoint_set_aside",
    "checkpoint_archived",
    "archive_failed",
    "stop_requested",
    "worker_failed",
    "node_lost",
    "hang_detected",
    "slow_step",  # so slow that its stacks were kept; nothing was ended
    "straggler",
    "preflight",
    "slow_node",
    "slow_gpu",
    "restarted",
    "shrunk",
    "spare_used",
    "requeued",
    "requeued_unasked",  # by a person, or by Slurm for its own reasons
    "finished",
    "stopped",
    "failed",
    "gave_up",
    "step_skipped",  # on all ranks: its gradient was not finite
    "rolled_back",  # to a checkpoint within the attempt, past some samples
    "pipeline_split",  # the layers of each stage, with what each block costs and what the split promises
    "compression_chosen",  # by strategy.compression=auto, with what was measured
    "pipeline_balance",  # what it came to, in the first steps
    "warning",
    "advice",
    "profiled",
    "bucket_size_chosen",
)


MOST_KEPT = 1000  # lines; of more, the oldest are lost
AGAIN_S = 0.2
AT_THE_END_S = 5.0  # for a file system that does not answer when the writer ends


class Unwritten:
    """The lines of one writer, each until it is in its file: a file system that fails does not end a run.

    The lines of a file stay in order. Used by any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: deque[tuple[Path, str]] = deque()
        self._failing = False
        self._lost = 0

    def add(self, path: Path, line: str) -> None:
        with self._lock:
            self._lines.append((path, line))
            if len(self._lines) > MOST_KEPT:
                self._lines.popleft()
                self._lost += 1
            self._write()

    def write_all(self, seconds: float) -> None:
        """Tries for ``seconds``; what is left then is lost."""
        until = time.monotonic() + seconds
        while self._lines and time.monotonic() < until:
            with self._lock:
                self._write()
            if self._lines:
                time.sleep(AGAIN_S)
        if self._lines:
            _print(f"{len(self._lines)} lines of the event log are lost")

    def _write(self) -> None:
        failures: dict[Path, OSError] = {}
        left = deque[tuple[Path, str]]()
        for path, line in self._lines:
            if path not in failures:
                try:
                    if self._failing:  # a purge may have removed the directory, which was empty
                        path.parent.mkdir(parents=True, exist_ok=True)
                    append_text(path, line_end(path) + line if self._failing else line)
                    continue
                except OSError as error:
                    failures[path] = error
            left.append((path, line))
        self._lines = left
        if bool(left) != self._failing:
            self._failing = bool(left)
            self._tell(next(iter(failures.values()), None))

    def _tell(self, failure: OSError | None) -> None:
        """Prints one line when an outage begins and one when it is over."""
        text = f"the event log cannot be written; its lines are kept in memory until it can: {failure}"
        if failure is None:
            text = "the event log can be written again, and has the lines that were kept"
            text += f" but the first {self._lost}" if self._lost else ""
            self._lost = 0
        _print(text)


def _print(text: str) -> None:
    with suppress(OSError):  # nobody reads it any more
        print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class EventLog:
    """Appends events of one writer (``submitter``, ``agent-<node>``, ``rank-0003``) in one attempt.

    What cannot be written is kept in memory, and written before the writer's next event or by ``close``.
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
        """Returns the log of the same writer in another attempt; both share the lines that are not written yet."""
        writer = self.path.name.rpartition("-")[0]
        return replace(self, path=self.path.with_name(f"{writer}-{attempt:03d}.jsonl"), attempt=attempt)

    def close(self) -> None:
        """Writes what is unwritten; waits a few seconds for a file system that does not answer."""
        self._unwritten.write_all(AT_THE_END_S)

    def write(self, event: str, *, step: int | None = None, **details: Any) -> None:
        """Appends one event with the time, this node, rank, attempt and step. A failing file system raises nothing."""
        if event not in EVENTS:
            raise ValueError(f"unknown event {event!r}")
        head = {"time": time.time(), "event": event, "rank": self.rank, "node": socket.gethostname()}
        event_line = head | {"attempt": self.attempt, "step": step} | details
        self._unwritten.add(self.path, json.dumps(event_line, separators=(",", ":")) + "\n")
