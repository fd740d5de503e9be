"""Diagnoses the last failure of a run from its events, metrics and checkpoints, and from Slurm."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_train.checkpoint.store import CheckpointStore
from hpc_train.elastic.nodes import TOO_OFTEN, NodeFailures
from hpc_train.elastic.requeue import more_memory
from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import Event, Level
from hpc_train.run.exits import FIX, HOST_MEMORY, RESPONSES, Exit, Failure, advice_for
from hpc_train.run.ledger import Account, read_ledger
from hpc_train.run.rows import Line
from hpc_train.runs.job_status import NOT_LAUNCHED, JobStatus, SlurmStatuses, View, time_left
from hpc_train.runs.lookup import RunHandle, statuses_of
from hpc_train.runs.nccl_messages import NcclProblem, explain_nccl, nccl_warnings
from hpc_train.schedulers.slurm.client import query
from hpc_train.schedulers.slurm.reasons import JobFacts, explain, read_facts, sooner, with_gpus
from hpc_train.schedulers.slurm.records import FREE, Free
from hpc_train.telemetry.progress import ended_early
from hpc_train.telemetry.tracebacks import own_place

WITH_STACKS = ("hang_detected", "collective_timed_out")
LAST_STEPS = 15
TAIL_LINES = 25
# failures that come again with the same code and settings
SAME_AGAIN = (Failure.USER_ERROR, Failure.KERNEL, Failure.REFUSED, Failure.NAN)

# Advice for ends that the agents could not report, by the state that Slurm gives the job
BY_STATE = {
    "OUT_OF_MEMORY": "Slurm killed it for exceeding its memory: increase cluster.mem, or reduce batch.loader_workers",
    "TIMEOUT": "it did not stop before its time limit: increase cluster.time or elastic.stop_grace_s",
    "NODE_FAIL": RESPONSES[Failure.NODE_LOST].advice,
    "BOOT_FAIL": "its nodes failed to boot: submit it again, and report the nodes to the site",
    "DEADLINE": "its deadline passed: submit it again",
    "PREEMPTED": "a job with a higher priority preempted it: resume the run",
    "CANCELLED": "it was cancelled: resume the run",
}
NOT_LAUNCHED_ADVICE = (
    "check that the nodes can create files in {folder}, where the job's output goes; otherwise a node is faulty: "
    "cluster.exclude=NODE excludes it"
)


@dataclass(frozen=True)
class FailureCause:
    """The failure that caused the others. ``rank`` is None if no rank is responsible; ``stacks`` is a path.

    ``nccl`` has the last warnings that NCCL printed on that rank, ``gpus`` what the GPUs of its node reported.
    """

    kind: str
    message: str
    attempt: int
    time: float
    rank: int | None = None
    node: str | None = None
    traceback: str = ""
    stacks: str | None = None
    nccl: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()

    @property
    def nccl_problem(self) -> NcclProblem | None:
        """Returns what NCCL's messages mean; None without a known one."""
        return explain_nccl("\n".join((*self.nccl, self.message, self.traceback)))

    @property
    def who(self) -> str:
        return f"node {self.node}" if self.rank is None else f"rank {self.rank} on {self.node}"


@dataclass(frozen=True)
class LastCheckpoint:
    """Describes the newest checkpoint; ``step`` is 0 and ``path`` None without one. ``lost_*`` is the work after it."""

    step: int
    path: str | None
    lost_steps: int
    lost_s: float | None


@dataclass(frozen=True)
class Waiting:
    """Why a job is pending, when it is expected to start, and which changes would start it sooner."""

    reason: str
    words: str
    fix: str
    starts: str
    sooner: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """Holds the result of ``diagnose``. ``cause`` is None if nothing failed; ``advice`` has the best step first.

    ``ended_early`` is why a hook has ended the run before its last step.
    """

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
    excluded_nodes: tuple[ExcludedNode, ...]
    advice: tuple[str, ...]
    ledger: Account
    ended_early: str | None = None


def diagnose(
    found: RunHandle,
    statuses: dict[str, JobStatus] | None = None,
    *,
    asks_slurm: bool = True,
    spent: Account | None = None,
) -> Diagnosis:
    """Diagnoses a run.

    Args:
        statuses: the states of Slurm jobs; None asks Slurm for them.
        asks_slurm: whether to ask Slurm for the facts of the job, if the run was submitted to it.
        spent: the time account of the run; None reads it.
    """
    known = statuses_of([found], SlurmStatuses()) if statuses is None else statuses
    status = known.get(found.job_id or "")
    view = found.view({} if status is None else {found.job_id or "": status})
    events = found.run.read_events()
    cause = _with_nccl(find_cause(events), found.run)
    waits = status is not None and status.is_pending
    facts = read_facts(found.job_id) if found.job_id and asks_slurm else None
    hours = found.plain_config.get("elastic", {}).get("exclude_hours", 0.0)
    metrics = list(found.run.read_all_metrics())
    of_attempt = [line for line in metrics if cause is None or line.attempt == cause.attempt]
    return Diagnosis(
        run=str(found.run.path),
        job_id=found.job_id,
        state=view.state,
        exit_code=view.exit,
        message=view.message,
        cause=cause,
        waiting=_waiting(found, status, view) if waits and status and asks_slurm else None,
        slurm=facts,
        peak_memory_bytes=max((line.get("peak_memory_bytes") or 0 for line in of_attempt), default=0) or None,
        checkpoint=_checkpoint(found.run, cause, events, of_attempt),
        done=tuple(event for event in events if event.kind.level >= Level.REACTION)[-LAST_STEPS:],
        excluded_nodes=tuple(excluded_nodes(found.run, hours)),
        advice=tuple(_advice(view, cause, facts, found)),
        ledger=spent or read_ledger(found.run, None if view.exit is not None else time.time()).total,
        ended_early=ended_early(found.run),
    )


@dataclass(frozen=True)
class SweepFailure:
    """Describes what runs of a sweep failed from, with the first one's message; ``runs`` are indices.

    ``place`` is the line of the user's code, such as ``net.py:14 in forward``; empty if it is not known.
    """

    kind: str
    message: str
    place: str
    advice: str
    runs: tuple[int, ...]


def sweep_failures(found: Sequence[RunHandle], views: Sequence[View]) -> list[SweepFailure]:
    """Returns why runs of a sweep did not finish; runs whose messages differ only in numbers are told together.

    Unlike ``diagnose`` it asks Slurm nothing.
    """
    groups: dict[tuple[str, str], SweepFailure] = {}
    for index, (item, view) in enumerate(zip(found, views, strict=True)):
        if view.exit in (None, Exit.DONE):
            continue
        kind, message, place, whole = _why_ended(item.run, view)
        alike = kind, re.sub(r"\d+", "0", message)
        advice = advice_for(Failure(kind), whole) if kind in list(Failure) else ""
        group = groups.get(alike, SweepFailure(kind, message, place, advice, ()))
        groups[alike] = replace(group, runs=(*group.runs, index))
    return sorted(groups.values(), key=lambda group: -len(group.runs))


def _why_ended(run: RunDirectory, view: View) -> tuple[str, str, str, str]:
    """Returns the class, or the state, of a run that did not finish, the line of its message that says most, and the
    line of the user's code, and the whole message.
    """
    cause = find_cause(run.read_events()) if view.exit != Exit.STOPPED else None
    if cause is not None:
        first = next(iter(cause.message.strip().splitlines()), "")
        # the line of the traceback also names the exception: KeyError: 'x'
        lines = reversed(cause.traceback.strip().splitlines())
        message = next((line for line in lines if line.endswith(first)), first)
        return cause.kind, message, own_place(cause.traceback) or "", cause.message
    last = next(iter(reversed(view.message.strip().splitlines())), "")  # the end of a traceback
    return view.state, last, "", view.message


def find_cause(events: Sequence[Event]) -> FailureCause | None:
    """Returns the first failure of the newest failed attempt, leaving out the secondary failures that it caused.

    A file system that could not be written is the cause of a hang or a loss of a node meanwhile, and otherwise counts
    only if nothing failed.
    """
    failed = [event for event in events if event.kind.is_failure]
    late = [event for event in events if event.kind.is_of_attempt_before and event.failure is not None]
    failed += [Event(event | {"attempt": event.attempt - 1}) for event in late]
    outages = [event for event in events if event.name == "file_system_failed"]
    failed = failed or outages[-1:]
    if not failed:
        return None
    newest = max(event.attempt for event in failed)
    own = [event for event in failed if event.attempt == newest]
    first = min(own, key=_weight)
    first = next((outage for outage in outages if _explains(outage, first)), first)
    looks = (event for event in events if event.name in WITH_STACKS and event.attempt == newest)
    stacks = next((look.stacks for look in looks if look.stacks), None)
    return FailureCause(
        kind=_kind(first),
        message=first.message if "message" in first else first.reason,
        attempt=newest,
        time=first.time,
        rank=first.rank,
        node=first.node,
        traceback=first.traceback,
        stacks=stacks,
        gpus=tuple(first.get("gpus", ())),
    )


AFTER_OUTAGE_S = 30.0  # until it is found that nodes or ranks stood still


def _explains(outage: Event, failure: Event) -> bool:
    """Returns whether ``failure`` means that something stood still, and did so because of ``outage``."""
    began = outage.get("began", outage.time)
    stood_still = _kind(failure) in (Failure.HANG, Failure.NODE_LOST, Failure.COMMUNICATION)
    return stood_still and bool(began <= failure.time <= outage.time + AFTER_OUTAGE_S)


def _with_nccl(cause: FailureCause | None, run: RunDirectory) -> FailureCause | None:
    if cause is None or cause.rank is None or cause.node is None:
        return cause
    return replace(cause, nccl=nccl_warnings(run, cause.node, cause.rank, cause.attempt))


def _kind(event: Event) -> str:
    of_event = {"hang_detected": Failure.HANG, "node_lost": Failure.NODE_LOST}
    return event.failure or str(of_event.get(event.name, event.name))


def _weight(event: Event) -> tuple[bool, bool, bool, float]:
    """Sorts the cause first: no secondary failure, with a rank or node, with a traceback; then the earliest."""
    secondary = event.failure == Failure.COMMUNICATION
    anonymous = event.name == "stopped_retrying" or (event.name == "hang_detected" and event.rank is None)
    return secondary, anonymous, "traceback" not in event, event.time


def _checkpoint(
    run: RunDirectory, cause: FailureCause | None, events: Sequence[Event], metrics: Sequence[Line]
) -> LastCheckpoint:
    newest = CheckpointStore(run.checkpoints).newest()
    step, path = (0, None) if newest is None else (newest.step, str(newest.path))
    if cause is None or run.record().get("own_code") == "command":  # a script saves where only it knows
        return LastCheckpoint(step, path, 0, None)
    saved = [event for event in events if event.name == "checkpoint_saved" and event.time < cause.time]
    kept, since = max(((event["step"], event.time) for event in saved), default=(0, None))
    started = [event.time for event in events if event.name == "started" and event.attempt == cause.attempt]
    since = max([time for time in (since, *started) if time is not None], default=None)
    furthest = max((line.step for line in metrics), default=0)
    return LastCheckpoint(step, path, max(0, furthest - kept), None if since is None else max(0.0, cause.time - since))


def _advice(view: View, cause: FailureCause | None, facts: JobFacts | None, item: RunHandle) -> list[str]:
    """Returns what to do after the failure; empty if the run is done or is running again."""
    if view.exit in (None, Exit.DONE):
        return []
    saved = CheckpointStore(item.run.checkpoints).newest() is not None
    found = [BY_STATE[facts.state]] if facts is not None and facts.state in BY_STATE else []
    if facts is not None and facts.exit_code.endswith(":9") and view.state == "stopped":
        found.append("its batch script was killed by SIGKILL (scancel --batch, or a lack of memory on the batch host)")
    if NOT_LAUNCHED in view.message:
        found.append(NOT_LAUNCHED_ADVICE.format(folder=Path(item.submission.get("output", item.run.logs)).parent))
    if cause is not None and cause.kind in list(Failure):
        by_job = facts is not None and HOST_MEMORY in cause.message  # its memory is that of cluster.mem
        known = advice_for(Failure(cause.kind), cause.message, None if item.config.run.command else saved)
        found.insert(0, more_memory(item.config.cluster.mem) if by_job else known)
    else:  # of an agent, or a job before its agents, that has refused the run
        found[:0] = FIX.findall(view.message if cause is None else cause.message)
    if cause is not None and (problem := cause.nccl_problem) is not None:
        found.insert(0, f"{problem.meaning}: {problem.fix}")
    where = shown(item.run.path)
    refused = cause is None and FIX.search(view.message) is not None
    if not refused and (cause is None or cause.kind not in SAME_AGAIN):
        begins = "resumes from the last checkpoint" if saved else "starts again: there is no checkpoint"
        found.append(f"python -m hpc_train resume {where}   {begins}")
    return [*dict.fromkeys(filter(None, found)), f"python -m hpc_train logs {where}   prints all output"]


def shown(path: Path) -> str:
    """Returns the path, relative to the current directory if it is below it."""
    with suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def _waiting(found: RunHandle, status: JobStatus, view: View) -> Waiting:
    reason = explain(status.reason)
    if view.exit == Exit.DONE:
        words = f"the run is done, and Slurm has requeued its job: {reason.words}"
        return Waiting(status.reason, words, f"scancel {found.job_id}", status.starts, ())
    changes: list[str] = []
    if reason.by_size:
        gpus, rest = found.config.cluster.gpus_per_node, time_left(view)
        free = Free.read_all(query(FREE) or "")
        if not isinstance(gpus, int):
            gpus = with_gpus(found.config.cluster, free)
        changes = sooner(found.config.cluster, gpus, free, rest)
    return Waiting(
        reason=status.reason,
        words=reason.words,
        fix=reason.fix.format(job=found.job_id),
        starts=status.starts,
        sooner=tuple(changes),
    )


@dataclass(frozen=True)
class ExcludedNode:
    """A node that the run excludes, with its recent failures. ``until``: when it is allowed again, as Unix time."""

    node: str
    failures: tuple[str, ...]
    until: float

    @property
    def words(self) -> str:
        """One line with the failures and the command that drains the node."""
        classes = ", ".join(self.failures)
        one = len(self.failures) == 1
        count, reason = (
            ("once", "failure") if one else (f"{len(self.failures)} times", f"{len(self.failures)} failures")
        )
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.until))
        drain = f"scontrol update nodename={self.node} state=drain reason='{reason}: {classes}'"
        failed = f"{self.node} failed {count} ({classes}) and is excluded until {until}"
        return f"{failed}; administrators drain it with: {drain}"


def excluded_nodes(run: RunDirectory, exclude_hours: float) -> list[ExcludedNode]:
    """Returns the nodes that ``run`` excludes now, sorted by name. ``exclude_hours`` comes from the run's config."""
    failures, found = NodeFailures(run, exclude_hours * 3600), []
    recent = failures.recent()
    for node in sorted(failures.failing_nodes()):
        own = [line for line in recent if line["node"] == node]
        times = sorted(line["time"] for line in own for _ in range(line.get("times", 1)))
        found.append(ExcludedNode(node, tuple(line["class"] for line in own), times[-TOO_OFTEN] + exclude_hours * 3600))
    return found
