"""Determines the state of submitted jobs from their scheduler, and their progress from the run directory.

A scheduler is queried rarely, once for all of its jobs. The progress is read in the same way for every executor.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from hpc_train.run.directory import RunDirectory, rank_writer
from hpc_train.run.events import Event
from hpc_train.run.exits import Exit
from hpc_train.run.lease import job_ids
from hpc_train.run.requests import HoldRequest, hold_requested, stop_was_requested
from hpc_train.schedulers.scheduler import PRESENT, JobStatus, SubmittedJobs
from hpc_train.schedulers.states import state_of
from hpc_train.telemetry.tracebacks import own_frames

ASK_EVERY_S = 30.0
ASK_MANY_EVERY_S = 60.0  # the interval for more than MANY jobs
MANY = 100


class JobStatuses:
    """Provides the status of submitted jobs. Each scheduler is queried at most every 30 s (60 s for many jobs).
    ``silent`` states whether the schedulers have just failed to respond, so that they are not queried again within that
    time."""

    def __init__(self, *, silent: bool = False) -> None:
        self._listed: dict[SubmittedJobs, Mapping[str, JobStatus]] = {}  # the last answer
        self._asked: dict[SubmittedJobs, frozenset[str]] = {}  # the ids that it concerns
        self._first = time.monotonic() if silent else float("-inf")
        self._queried_at: dict[SubmittedJobs, float] = {}

    def of(self, ids: Collection[str], jobs: SubmittedJobs) -> dict[str, JobStatus]:
        """Returns the status of the jobs ``ids`` that their scheduler knows; a job counts as present until it has
        responded about it."""
        pause = ASK_MANY_EVERY_S if len(ids) > MANY else ASK_EVERY_S
        if ids and time.monotonic() - self._queried_at.get(jobs, self._first) >= pause:
            self._queried_at[jobs] = time.monotonic()
            answer = jobs.statuses(ids)
            if answer is not None:
                self._listed[jobs] = answer
                self._asked[jobs] = frozenset(ids)
        listed = self._listed.get(jobs, {})
        not_asked = dict.fromkeys(set(ids) - self._asked.get(jobs, frozenset()), PRESENT)
        return not_asked | {job_id: listed[job_id] for job_id in ids if job_id in listed}


def folded(chains: Mapping[str, Sequence[str]], jobs: Mapping[str, JobStatus]) -> dict[str, JobStatus]:
    """Returns ``jobs`` with the status of each chain added under the id of its first job.

    It is the status of the running job, else of the next one, else of the last one that was not cancelled.
    """
    statuses = dict(jobs)
    for first, ids in chains.items():
        present = [job_id for job_id in ids if job_id in jobs and jobs[job_id].present]
        running = [job_id for job_id in present if not jobs[job_id].is_pending]
        ended = [job_id for job_id in ids if job_id in jobs and job_id not in present]
        by_themselves = [job_id for job_id in ended if jobs[job_id].state != "CANCELLED"]
        by_preference = [*running, *present, *reversed(by_themselves), *ended]
        if by_preference:
            current = by_preference[0]
            part = f"job {current}"
            if len(ids) > 1:
                part += f", {ids.index(current) + 1} of {len(ids)}"
            statuses[first] = replace(jobs[current], part=part)
    return statuses


# signals that users send; after others the scheduler may run the job again
USER_SIGNALS = ("SIGUSR1", "SIGINT", "SIGHUP")

NOT_LAUNCHED = "JobLaunchFailure"  # Slurm's reason, e.g. if a node cannot create the job's output file
NOT_STARTED = "not started"  # the user has ended the submission before
TO_BE_REQUEUED = "to be requeued"  # the agents have requested it, and Slurm has not requeued the job yet
STATES: dict[int, str] = {Exit.DONE: "done", Exit.STOPPED: "stopped", Exit.REFUSED: "refused", Exit.GAVE_UP: "given up"}


@dataclass(frozen=True)
class View:
    """Holds a snapshot of a job. ``is_working`` is False while it waits in the queue, is suspended or is held.

    ``exit`` is None until the job has ended. ``metrics`` is the newest logged step, empty before the first; its
    ``step`` is the step of the last checkpoint if the run was stopped after one. ``steps`` is the total number of
    steps, if known. ``nodes`` is the number of allocated nodes.
    """

    state: str
    metrics: dict[str, Any]
    exit: int | None = None
    message: str = ""
    steps: int | None = None
    restarts: int = 0
    nodes: int | None = None
    is_working: bool = True


def time_left(view: View) -> float | None:
    """Returns the seconds until the last step at the speed of the newest one; None if unknown or not at work."""
    step = view.metrics.get("step")
    step_s = view.metrics.get("step_s")
    if view.exit is not None or not view.is_working or view.steps is None or step is None or step_s is None:
        return None
    return (view.steps - step) * step_s


def view_of(
    run: RunDirectory, first_attempt: int, status: JobStatus | None, output: Path, steps: int | None = None
) -> View:
    """Returns a snapshot of the attempts of ``run`` from ``first_attempt`` on.

    The run directory takes precedence over ``status``, which may be a minute old. Until these attempts have logged a
    step, the metrics describe the newest step before them.

    Args:
        output: the file with the output of the agents.
        steps: the total number of steps, if the config has it.
    """
    view = _view_of(run, first_attempt, status, output, steps)
    if not view.metrics:
        view = replace(view, metrics=run.last_logged_step())
    if view.exit == Exit.STOPPED and (saved := last_saved(run)) > view.metrics.get("step", 0):
        view = replace(view, metrics=view.metrics | {"step": saved})
    if not view.metrics:
        return view
    return replace(view, steps=view.steps or steps or run.record().get("total_steps"))


def _view_of(run: RunDirectory, first_attempt: int, status: JobStatus | None, output: Path, steps: int | None) -> View:
    attempt = run.newest_attempt()
    present = status is not None and status.present
    if attempt < first_attempt:
        if status is not None and present:
            return View(status.words, {}, is_working=False)
        return _lost(run, View("failed", {}), status, output)
    view = View(
        state="starting",
        metrics=run.newest_metrics(attempt),
        steps=steps or run.record().get("total_steps"),
        restarts=attempt - first_attempt,
        nodes=run.attempt_record(attempt).get("nodes"),
    )
    if view.metrics or run.record().get("own_code") == "command":  # which need not report its steps
        view = replace(view, state="running")
    if view.restarts and not view.metrics:
        view = replace(view, metrics=run.newest_metrics(attempt - 1))
    end = attempt_end(run, attempt)
    if end is None:
        if status is not None and (status.is_suspended or _was_requeued(run, attempt, status)):
            return replace(view, state=status.words, is_working=False)
        if stop_was_requested(run):
            view = replace(view, state="stopping", is_working=False)
        if not present:
            return _lost(run, view, status, output)
        return replace(view, message=_message_of_agents(run, attempt, view))
    if present and not end.final:
        return replace(view, state=_between_starts(end.state, status), is_working=False)
    code = end.event.exit_code or Exit.DONE
    if code == Exit.STOPPED and end.event.failure is not None:  # a node was lost, and Slurm has not requeued the job
        code = Exit.FAILED
    state = STATES.get(code, "failed")
    if code == Exit.STOPPED and _cancelled(status):
        state = "cancelled"
    return replace(view, state=state, exit=final_code(code, run), message=failure_text(run, end.event))


def _message_of_agents(run: RunDirectory, attempt: int, view: View) -> str:
    """Returns what a live run reports: that a person holds it, the last message about missing progress, unless a step
    was logged since then, or the nodes that it waits for.
    """
    request = hold_requested(run)
    if request is not None and (held := hold_of(run, attempt, request)) is not None:
        return held.message
    events = sorted(run.events_of("agent-*", attempt), key=attrgetter("time"))
    silent = [event for event in events if event.name == "no_progress"]
    resizes = [event for event in events if event.name in ("resize_requested", "resize_refused")]
    if silent and view.metrics.get("time", 0.0) <= silent[-1].time:
        return silent[-1].message
    if resizes and resizes[-1].name == "resize_requested" and resizes[-1]["nodes"] != view.nodes:
        return resizes[-1].message
    return view.message


def hold_of(run: RunDirectory, attempt: int, request: HoldRequest) -> Event | None:
    """Returns the event ``held`` with which a rank has answered ``request``; None before it or after the hold."""
    events = [*run.events_of(rank_writer(request.rank), attempt)]
    answers = [event for event in events if event.get("requested") == request.time]
    return answers[0] if len(answers) == 1 and answers[0].name == "held" else None


def view_at_end(run: RunDirectory, code: int) -> View:
    """Returns the view of a run whose agent, in this process, has ended with ``code``."""
    view = view_of(run, 0, None, Path(os.devnull))
    if code == Exit.REFUSED:
        view = replace(view, state=STATES[Exit.REFUSED])
    return replace(view, exit=code)


def outcome(run: RunDirectory, view: View) -> str:
    """Returns the state of a run as a JSON object in one line."""
    record = run.record()
    jobs = job_ids((record.get("submissions") or [{}])[-1])
    result = record.get("result") if view.exit == Exit.DONE else None
    return json.dumps(
        {"run": str(run.path), "job_ids": jobs, "state": view.state, "exit_code": view.exit, "result": result}
    )


def final_code(code: int, run: RunDirectory) -> int:
    """Returns the exit code of a command for a run that has ended with ``code``.

    75 means that the same command continues from a checkpoint. Without a checkpoint the code is 1; otherwise a script
    that repeats the command as long as it returns 75 would never end. A custom command (``run.command``) is assumed to
    have saved, since only it knows where it saves.
    """
    if code != Exit.STOPPED or any(run.checkpoints.glob("step-*")) or run.record().get("own_code") == "command":
        return code
    return Exit.FAILED


def command_exit_code(run: RunDirectory) -> int | None:
    """Returns the exit code of ``run.command`` with which the newest attempt failed; None if it ended otherwise."""
    codes = [event.get("command_exit_code") for event in run.events_of("agent-*", run.newest_attempt())]
    return next((code for code in reversed(codes) if code is not None), None)


def last_saved(run: RunDirectory) -> int:
    """Returns the step of the newest checkpoint by the names of the directories; 0 without one."""
    names = (path.name.removeprefix("step-").partition(".")[0] for path in run.checkpoints.glob("step-*"))
    return max((int(name) for name in names if name.isdecimal()), default=0)


def how_stopped(code: int, run: RunDirectory, state: str = "stopped") -> str:
    """Returns how a run was stopped and what the command that follows does, by its exit code."""
    if code != Exit.STOPPED:
        return f"{state} before the first checkpoint; start again with"
    if state == "cancelled":
        return "cancelled; resume with"
    if run.record().get("own_code") == "command":
        return f"{state}; resume with"
    saved = last_saved(run)
    where = f" at step {saved}" if saved else ""
    return f"stopped after a checkpoint{where}; resume with"


def _was_requeued(run: RunDirectory, attempt: int, status: JobStatus) -> bool:
    """Returns whether Slurm has put the job back into the queue after ``attempt`` started: no agent recorded its end,
    as when its nodes failed. A state that was queried before the attempt started does not count.
    """
    try:
        started = (run.attempts / f"{attempt:03d}.json").stat().st_mtime
    except FileNotFoundError:
        return False
    return status.is_pending and status.queried > started


def _between_starts(ended: str, status: JobStatus | None) -> str:
    """Returns the state of a job that may be started again without the user."""
    if status is None:
        return ended
    if status.is_pending and ended != "requeued":  # after a requeue that the agents did not request
        return status.words
    if status.is_pending:
        return f"{ended}, {status.words}"
    if status.is_running and ended == "requeued":
        return TO_BE_REQUEUED
    return ended


@dataclass(frozen=True)
class AttemptEnd:
    """Describes the end of the last attempt of a job. ``final`` is False if the job may start again by itself."""

    event: Event
    state: str
    final: bool


def attempt_end(run: RunDirectory, attempt: int) -> AttemptEnd | None:
    """Returns the end of the job as the rendezvous server recorded it; None while the job runs."""
    events = list(run.events_of("agent-*", attempt))
    ends = sorted((event for event in events if event.exit_code is not None), key=attrgetter("time"))
    if not ends:
        return None
    end = ends[-1]
    if end.name == "failed":
        return AttemptEnd(end, "failing", True)
    if any(event.name == "requeued" for event in events):
        return AttemptEnd(end, "requeued", False)
    if end.name == "stopped":
        return AttemptEnd(end, "stopping", end.reason in USER_SIGNALS)
    return AttemptEnd(end, "finishing", True)


def _cancelled(status: JobStatus | None) -> bool:
    return status is not None and status.state == "CANCELLED"


def _lost(run: RunDirectory, view: View, status: JobStatus | None, output: Path) -> View:
    """Returns the view of a job that ended without a record: its last output and its state in the scheduler."""
    if _cancelled(status):
        code = Exit.FAILED if view.metrics else Exit.STOPPED
        return replace(view, state="cancelled", exit=final_code(code, run))
    if stop_was_requested(run) and not view.metrics:
        message = f"stopped before the first step ({run.record().get('stop_requested_by', 'cancel')})"
        return replace(view, state="cancelled", exit=final_code(Exit.STOPPED, run), message=message)
    if not run.path.exists():  # the records of the agent are gone, too
        message = f"the run directory {run.path} was deleted while the job was running"
        return replace(view, state="failed", exit=Exit.FAILED, message=message)
    message = "\n".join(run.end_of_output(output).strip().splitlines()[-30:])
    if not message and status is not None and NOT_LAUNCHED in status.reason:
        message = f"Slurm could not launch the job ({status.reason})"
    if not message:
        when = f"after step {view.metrics['step']}" if "step" in view.metrics else "before its first step"
        message = f"the run ended {when} and printed nothing; its processes may have been killed"
    if status is not None and not state_of(status.state).by_itself:
        message = f"the scheduler reports {status.state}\n{message}"
    return replace(view, state="failed", exit=Exit.FAILED, message=message)


def resume_command(arguments: Sequence[str], run: RunDirectory, root: str, *, submits: bool = False) -> str:
    """Returns the command line that resumes ``run`` by its name; with ``-m`` if ``submits``."""
    name = f"run.name={os.path.relpath(run.path, root)}"
    words = [part for part in arguments if not part.startswith(("run.name=", "run.fork="))]
    # next to the other overrides, because Hydra's parser requires all overrides to be adjacent
    first = next((index for index, part in enumerate(words) if "=" in part and not part.startswith("-")), len(words))
    words.insert(first, name)
    if submits:
        words.insert(0, "-m")
    return shlex.join(["python", "-m", "hpc_train", *words])


def failure_text(run: RunDirectory, end: Event, *, whole: bool = False) -> str:
    """Returns the traceback of the failing rank, ``whole`` or its own frames, and why the run was given up."""
    if end.failure is None or end.exit_code == Exit.REFUSED:
        return end.message
    text = f"rank {end.rank} on {end.node} failed ({end.failure}): {end.message}"
    for event in run.read_events():
        if event.name == "worker_failed" and event.attempt == end.attempt and "traceback" in event:
            traceback = event.traceback.rstrip()
            if not whole:
                traceback = own_frames(traceback)
            text = f"rank {end.rank} on {end.node} failed ({end.failure}):\n{traceback}"
            break
    if end.name == "stopped_retrying":
        text += f"\ngiven up: {end.message}"
    return text
