"""Writes and reads the event log of a run, which has one file per writing process and attempt.

No two processes share a file, because two clients of a network file system that append to one file lose lines.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpc_train.run.clock import Clock
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Failure, classify_message
from hpc_train.run.file_writer import FileWriter, Outage

EVENTS = (
    "submitted",
    "started",
    "resumed",
    "checkpoint_saved",
    "checkpoint_failed",
    "save_deferred",  # the final save waits for free disk space
    "checkpoint_set_aside",
    "stop_requested",
    "worker_failed",
    "node_lost",
    "agents_killed",  # by a signal, with the whole step of the job; the next step writes it
    "hang_detected",
    "collective_timed_out",  # on a rank that then failed; the stacks of the others were saved before they were killed
    "file_system_failed",  # after it, with its seconds: the run directory could not be written
    "suspended",  # after Slurm has resumed the job: the seconds during which its processes were stopped
    "paused",  # the batch host did not execute for some seconds, although the job was not suspended
    "gpu_memory_awaited",  # after an attempt that ran out of GPU memory
    "no_progress",  # for a minute or more: the phase, the rank and the line of its code; nothing was killed
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
    "ended_early",  # by a hook, before the last step
    "finished",
    "stopped",
    "failed",
    "stopped_retrying",
    "step_skipped",  # skipped on all ranks because the gradient was not finite
    "rolled_back",  # restored a checkpoint within the attempt, skipping some samples
    "evaluation_started",
    "stream_ended",  # the data ended before train.steps
    "first_step",  # of a restarted attempt or one that compiles: its seconds, and whether artifacts were loaded
    "pipeline_split",  # the layers of each stage, the cost of each block, and the predicted step time
    "pipeline_balance",  # measured balance of the stages in the first steps
    "pipeline_step",  # when each stage computed in one of the first steps, for the report
    "warning",
    "advice",
    "gpu_idle",  # for telemetry.gpu_idle_minutes
    "profiled",
    "loop",  # one of the user's own loop (run.entry), with its name
)


def _writer() -> FileWriter:
    return FileWriter("the event log")


@dataclass(frozen=True)
class EventLog:
    """Appends events of one writer (``submitter``, ``agent-<node>``, ``rank-0003``) in one attempt.

    A thread writes them (``FileWriter``): lines that cannot be written stay in memory until they can.
    """

    path: Path
    attempt: int
    rank: int | None = None
    writer: FileWriter = field(default_factory=_writer, compare=False, repr=False)
    hear: Callable[[dict[str, Any]], object] | None = field(default=None, compare=False, repr=False)
    clock: Clock = field(default_factory=Clock.inherited, compare=False)

    def __post_init__(self) -> None:
        self.writer.on_outage = self.write_outage

    @classmethod
    def open(
        cls, run: RunDirectory, writer: str, attempt: int, rank: int | None = None, clock: Clock | None = None
    ) -> EventLog:
        return cls(run.events_file(writer, attempt), attempt, rank, clock=clock or Clock.inherited())

    def write_outage(self, outage: Outage) -> None:
        """Appends an event about a time in which files of the run directory could not be written. Does not wait."""
        message = f"files of the run directory could not be written for {outage.seconds:.0f} s: {outage.failure}"
        kind = classify_message(outage.failure) or Failure.FILE_SYSTEM
        times = {"began": self.now() - outage.seconds, "seconds": round(outage.seconds, 3)}
        self._append("file_system_failed", None, times | {"class": kind, "message": message}, wait=False)

    def now(self) -> float:
        """Returns the time by the clock of the job, in seconds since 1970."""
        return self.clock.now()

    def of(self, attempt: int) -> EventLog:
        """Returns the log of the same process in another attempt; both share the pending lines."""
        writer = self.path.name.rpartition("-")[0]
        return replace(self, path=self.path.with_name(f"{writer}-{attempt:03d}.jsonl"), attempt=attempt)

    def heard_by(self, hear: Callable[[dict[str, Any]], object]) -> EventLog:
        """Returns the log of the same process that also calls ``hear`` with each event, after it was written."""
        return replace(self, hear=hear)

    def close(self) -> None:
        """Waits a few seconds for what is pending, if the file system does not respond."""
        self.writer.close()

    def record(self, run: RunDirectory, **fields: Any) -> None:
        """Merges ``fields`` into ``run.json`` as ``update_record`` does. A failing file system does not raise."""
        self.writer.put(run.path / "run.json", lambda again: run.update_record(**fields))

    def write(self, event: str, *, step: int | None = None, **details: Any) -> None:
        """Appends an event with time, node, rank, attempt and step. A failing file system does not raise."""
        self._append(event, step, details, wait=True)

    def _append(self, event: str, step: int | None, details: dict[str, Any], wait: bool) -> None:
        if event not in EVENTS:
            raise ValueError(f"unknown event {event!r}")
        head = {"time": self.now(), "event": event, "rank": self.rank, "node": socket.gethostname()}
        event_line = head | {"attempt": self.attempt, "step": step} | details
        self.writer.append(self.path, event_line, wait)
        if self.hear is not None:
            self.hear(event_line)
