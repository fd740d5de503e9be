"""The event log: what happened in a run, one file per writing process and attempt.

Two clients of a network file system that append to one file lose lines, so no two processes share one.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import append_line

EVENTS = (
    "submitted",
    "started",
    "resumed",
    "checkpoint_saved",
    "checkpoint_failed",
    "checkpoint_set_aside",
    "checkpoint_archived",
    "archive_failed",
    "stop_requested",
    "worker_failed",
    "node_lost",
    "hang_detected",
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


@dataclass(frozen=True)
class EventLog:
    """Appends events of one writer (``submitter``, ``agent-<node>``, ``rank-0003``) in one attempt."""

    path: Path
    attempt: int
    rank: int | None = None

    @classmethod
    def open(cls, run: RunDirectory, writer: str, attempt: int, rank: int | None = None) -> EventLog:
        run.events.mkdir(parents=True, exist_ok=True)
        return cls(run.events / f"{writer}-{attempt:03d}.jsonl", attempt, rank)

    def write(self, event: str, *, step: int | None = None, **details: Any) -> None:
        """Appends one event with the time, this node, rank, attempt and step."""
        if event not in EVENTS:
            raise ValueError(f"unknown event {event!r}")
        head = {"time": time.time(), "event": event, "rank": self.rank, "node": socket.gethostname()}
        append_line(self.path, head | {"attempt": self.attempt, "step": step} | details)
