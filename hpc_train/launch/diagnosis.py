"""The last failure of a run on one page, put together from its events, metrics and checkpoints, and from Slurm.

Nodes that a run avoids, as they failed too often, and what to ask the site's administrator about them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.checkpoint.store import CheckpointStore
from hpc_train.elastic.nodes import TOO_OFTEN, NodeFailures
from hpc_train.launch.job_status import JobStatus, SlurmStatuses
from hpc_train.launch.lookup import RunHandle, statuses_of
from hpc_train.launch.reasons import SINFO, JobFacts, explain, read_facts, read_free, sooner, with_gpus
from hpc_train.launch.watch import View, time_left
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import RESPONSES, Exit, Failure
from hpc_train.run.ledger import Account, read_ledger
from hpc_train.slurm.client import query

Event = dict[str, Any]

TOLD = ("worker_failed", "hang_detected", "node_lost", "failed", "gave_up")
STEPS = (  # what was done, besides what failed
    "stop_requested", "restarted", "shrunk", "spare_used", "requeued", "requeued_unasked", "resumed", "rolled_back",
    "checkpoint_failed", "save_waits", "checkpoint_set_aside", "slow_node", "slow_gpu",
)  # fmt: skip
LAST_STEPS = 15
TAIL_LINES = 25

# What Slurm calls an end that the agents could not tell of
BY_STATE = {
    "OUT_OF_MEMORY": "Slurm ended it for its memory: a larger cluster.mem, or fewer batch.loader_workers",
    "TIMEOUT": "it did not stop before its time limit: a longer cluster.time, or a longer elastic.stop_grace_s",
    "NODE_FAIL": RESPONSES[Failure.NODE_LOST].advice,
    "BOOT_FAIL": "its nodes did not start: submit it again, and tell the staff",
    "DEADLINE": "its deadline was over: submit it again",
    "PREEMPTED": "a job of a higher priority took its nodes: resume goes on",
    "CANCELLED": "somebody cancelled it: resume goes on",
}


@dataclass(frozen=True)
class FailureCause:
    """The failure that others followed from. ``rank`` is None where no rank is to blame; ``stacks`` is a file."""

    kind: str
    message: str
    attempt: int
    time: float
    rank: int | None = None
    node: str | None = None
    traceback: str = ""
    stacks: str | None = None

    @property
    def who(self) -> str:
        return f"node {self.node}" if self.rank is None else f"rank {self.rank} on {self.node}"


@dataclass(frozen=True)
class LastCheckpoint:
    """``step`` is 0 and ``path`` None without any; lost: what was done after it, and is not kept."""

    step: int
    path: str | None
    lost_steps: int
    lost_s: float | None


@dataclass(frozen=True)
class Waiting:
    """Of a job that Slurm has not started."""

    reason: str
    words: str
    fix: str
    starts: str
    sooner: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """``cause`` is None where nothing failed; ``advice`` is what to do, in the order of promise."""

    run: str
    job_id: str | None
    state: str
    exit_code: int | None
    message: str
    cause: FailureCause | None
    waiting: Waiting | None
    slurm: JobFacts | None
    peak_memory_bytes: int | None
    checkpoint: LastCheckpoint
    done: tuple[Event, ...]
    avoided: tuple[Avoided, ...]
    advice: tuple[str, ...]
    ledger: Account


def diagnose(found: RunHandle) -> Diagnosis:
    """Looks at ``found`` once; Slurm is asked where the run was a job of it."""
    standing = statuses_of([found], SlurmStatuses()).get(found.job_id or "")
    view = found.view({} if standing is None else {found.job_id or "": standing})
    events = found.run.read_events()
    cause = find_cause(events)
    waits = standing is not None and standing.is_pending
    facts = read_facts(found.job_id) if found.job_id else None
    metrics = list(found.run.read_all_metrics())
    of_attempt = [line for line in metrics if cause is None or line["attempt"] == cause.attempt]
    return Diagnosis(
        run=str(found.run.path),
        job_id=found.job_id,
        state=view.state,
        exit_code=view.exit,
        message=view.message,
        cause=cause,
        waiting=_waiting(found, standing, view) if waits and standing else None,
        slurm=facts,
        peak_memory_bytes=max((line.get("peak_memory_bytes") or 0 for line in of_attempt), default=0) or None,
        checkpoint=_checkpoint(found.run, cause, events, of_attempt),
        done=tuple(event for event in events if event["event"] in (*TOLD, *STEPS))[-LAST_STEPS:],
        avoided=tuple(avoided(found.run, found.config.elastic.exclude_hours)),
        advice=tuple(_advice(view, cause, facts, found.run)),
        ledger=read_ledger(found.run, None if view.exit is not None else time.time()).total,
    )


def find_cause(events: Sequence[Event]) -> FailureCause | None:
    """The first real failure of the newest attempt that failed: not the echo that it had on other ranks."""
    failed = [event for event in events if event["event"] in TOLD]
    if not failed:
        return None
    newest = max(event["attempt"] for event in failed)
    own = [event for event in failed if event["attempt"] == newest]
    first = min(own, key=_weight)
    hang = next((event for event in own if event["event"] == "hang_detected" and event.get("stacks")), {})
    return FailureCause(
        kind=_kind(first),
        message=str(first.get("message", first.get("reason", ""))),
        attempt=newest,
        time=first["time"],
        rank=first.get("rank"),
        node=first.get("node"),
        traceback=first.get("traceback", ""),
        stacks=hang.get("stacks"),
    )


def _kind(event: Event) -> str:
    of_event = {"hang_detected": Failure.HANG, "node_lost": Failure.NODE_LOST}
    return str(event.get("class") or of_event.get(event["event"], event["event"]))


def _weight(event: Event) -> tuple[bool, bool, bool, float]:
    """The cause comes first: no echo, somebody named, with a traceback; then the earliest."""
    echo = event.get("class") == Failure.COMMUNICATION
    nobody = event["event"] == "gave_up" or (event["event"] == "hang_detected" and event.get("rank") is None)
    return echo, nobody, "traceback" not in event, event["time"]


def _checkpoint(
    run: RunDirectory, cause: FailureCause | None, events: Sequence[Event], metrics: Sequence[Event]
) -> LastCheckpoint:
    newest = CheckpointStore(run.checkpoints).newest()
    step, path = (0, None) if newest is None else (newest.step, str(newest.path))
    if cause is None:
        return LastCheckpoint(step, path, 0, None)
    saved = [e for e in events if e["event"] == "checkpoint_saved" and e["time"] < cause.time]
    kept, since = max(((e["step"], e["time"]) for e in saved), default=(0, None))
    started = [e["time"] for e in events if e["event"] == "started" and e["attempt"] == cause.attempt]
    since = max([time for time in (since, *started) if time is not None], default=None)
    furthest = max((line["step"] for line in metrics), default=0)
    return LastCheckpoint(step, path, max(0, furthest - kept), None if since is None else max(0.0, cause.time - since))


def _advice(view: View, cause: FailureCause | None, facts: JobFacts | None, run: RunDirectory) -> list[str]:
    """Nothing where the run is done, or at work after its failure."""
    if view.exit in (None, Exit.DONE):
        return []
    found = [BY_STATE[facts.state]] if facts is not None and facts.state in BY_STATE else []
    if cause is not None and cause.kind in list(Failure):
        found.insert(0, RESPONSES[Failure(cause.kind)].advice)
    where = shown(run.path)
    if cause is None or cause.kind not in (Failure.USER_ERROR, Failure.KERNEL, Failure.REFUSED):
        found.append(f"python -m hpc_train resume {where}   goes on from the last checkpoint")
    return [*dict.fromkeys(filter(None, found)), f"python -m hpc_train logs {where}   has all output"]


def shown(path: Path) -> str:
    """As short as it can be from here."""
    with suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def _waiting(found: RunHandle, standing: JobStatus, view: View) -> Waiting:
    reason = explain(standing.reason)
    changes: list[str] = []
    if reason.by_size:
        gpus, rest = found.config.cluster.gpus_per_node, time_left(view)
        free = read_free(query(SINFO) or "")
        if not isinstance(gpus, int):
            gpus = with_gpus(found.config.cluster, free)
        changes = sooner(found.config.cluster, gpus, free, rest)
    return Waiting(
        reason=standing.reason,
        words=reason.words,
        fix=reason.fix.format(job=found.job_id),
        starts=standing.starts,
        sooner=tuple(changes),
    )


@dataclass(frozen=True)
class Avoided:
    """``until``: seconds since 1970; then its failures count no more."""

    node: str
    failures: tuple[str, ...]
    until: float

    @property
    def words(self) -> str:
        """With the command that takes the node out of service, for who may do so."""
        told = ", ".join(self.failures)
        one = len(self.failures) == 1
        count, reason = (
            ("once", "failure") if one else (f"{len(self.failures)} times", f"{len(self.failures)} failures")
        )
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.until))
        drain = f"scontrol update nodename={self.node} state=drain reason='{reason}: {told}'"
        return f"{self.node} failed {count} ({told}) and is avoided until {until}; for the staff: {drain}"


def avoided(run: RunDirectory, exclude_hours: float) -> list[Avoided]:
    """In the order of their names; ``exclude_hours`` is that of the run's config."""
    failures, found = NodeFailures(run, exclude_hours * 3600), []
    recent = failures.recent()
    for node in sorted(failures.failing_nodes()):
        own = [line for line in recent if line["node"] == node]
        times = sorted(line["time"] for line in own for _ in range(line.get("times", 1)))
        found.append(Avoided(node, tuple(line["class"] for line in own), times[-TOO_OFTEN] + exclude_hours * 3600))
    return found
