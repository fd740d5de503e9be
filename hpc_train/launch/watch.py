"""The progress of a submitted job, read from its run directory in the same way for every executor."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_train.launch.executors.executor import Job
from hpc_train.launch.job_status import JobStatus
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.run.files import last_line, read_json, read_lines
from hpc_train.slurm.states import state_of

WISHES = ("SIGUSR1", "SIGINT", "SIGHUP")  # signals that users send; after others the scheduler may run the job again

TO_BE_REQUEUED = "to be requeued"  # the agents have asked for it, and Slurm has not requeued the job yet
STATES = {Exit.DONE: "done", Exit.STOPPED: "stopped", Exit.REFUSED: "refused", Exit.GAVE_UP: "given up"}


@dataclass(frozen=True)
class View:
    """A snapshot of a job.

    ``exit`` is None until the job has ended. ``metrics`` is the newest logged step, empty before the first. ``steps``
    is the total number of steps, if known. ``nodes`` is the number of allocated nodes.
    """

    state: str
    metrics: dict[str, Any]
    exit: int | None = None
    message: str = ""
    steps: int | None = None
    restarts: int = 0
    nodes: int | None = None


def time_left(view: View) -> float | None:
    """Seconds until the last step at the speed of the newest one; None if unknown."""
    step, step_s = view.metrics.get("step"), view.metrics.get("step_s")
    if view.exit is not None or view.steps is None or step is None or step_s is None:
        return None
    return (view.steps - step) * step_s


@dataclass(frozen=True)
class Submitted:
    """A submitted job. Attempts before ``first_attempt`` belong to earlier submissions of the same run."""

    job: Job
    job_id: str
    first_attempt: int
    agent_output: Path

    def view(self, status: JobStatus | None) -> View:
        """A snapshot of the job. ``status`` is what its scheduler reports; None if it does not know the job."""
        steps = self.job.config.train.steps
        return view_of(self.job.run, self.first_attempt, status, self.agent_output, steps)


def view_of(
    run: RunDirectory, first_attempt: int, status: JobStatus | None, output: Path, steps: int | None = None
) -> View:
    """A snapshot of the attempts of ``run`` from ``first_attempt`` on.

    The run directory takes precedence over ``status``, which may be a minute old.

    Args:
        output: the file with the output of the agents.
        steps: the total number of steps, if the config has it.
    """
    attempt = run.newest_attempt()
    present = status is not None and status.present
    if attempt < first_attempt:
        if status is not None and present:
            return View(status.words, {})
        return _lost(View("failed", {}), status, output)
    known = View(
        state="starting",
        metrics=last_line(run.metrics_file(attempt)),
        steps=steps or run.record().get("total_steps"),
        restarts=attempt - first_attempt,
        nodes=_meeting(run, attempt).get("nodes"),
    )
    if known.metrics:
        known = replace(known, state="running")
    elif known.restarts:
        known = replace(known, metrics=last_line(run.metrics_file(attempt - 1)))
    end = attempt_end(run, attempt)
    if end is None:
        return known if present else _lost(known, status, output)
    if present and not end.final:
        return replace(known, state=_between_starts(end, status))
    code = end.event["exit_code"]
    if code == Exit.STOPPED and "class" in end.event:  # a lost node, and Slurm would not run the job again
        code = Exit.FAILED
    state = "cancelled" if code == Exit.STOPPED and _cancelled(status) else STATES.get(code, "failed")
    return replace(known, state=state, exit=code, message=failure_text(run, end.event))


def _between_starts(end: AttemptEnd, status: JobStatus | None) -> str:
    """The state of a job that may be started again without the user."""
    if end.state != "requeued" or status is None:
        return end.state
    if status.is_pending:
        return f"{end.state}, {status.words}"
    return TO_BE_REQUEUED if status.is_running else end.state


@dataclass(frozen=True)
class AttemptEnd:
    """The end of the last attempt of a job. ``final`` is False if the job may be started again without the user."""

    event: dict[str, Any]
    state: str
    final: bool


def attempt_end(run: RunDirectory, attempt: int) -> AttemptEnd | None:
    """The end of the job as the hub recorded it; None while the job runs."""
    events = [event for path in run.events.glob(f"agent-*-{attempt:03d}.jsonl") for event in read_lines(path)]
    ends = sorted((event for event in events if "exit_code" in event), key=lambda event: event["time"])
    if not ends:
        return None
    end = ends[-1]
    if end["event"] == "failed":
        return AttemptEnd(end, "failing", True)
    if any(event["event"] == "requeued" for event in events):
        return AttemptEnd(end, "requeued", False)
    if end["event"] == "stopped":
        return AttemptEnd(end, "stopping", end.get("reason") in WISHES)
    return AttemptEnd(end, "finishing", True)


def _meeting(run: RunDirectory, attempt: int) -> dict[str, Any]:
    path = run.attempts / f"{attempt:03d}.json"
    return read_json(path) if path.exists() and path.stat().st_size else {}


def _cancelled(status: JobStatus | None) -> bool:
    return status is not None and status.state == "CANCELLED"


def _lost(known: View, status: JobStatus | None, output: Path) -> View:
    """The view of a job that ended without a record: its last output and the state that the scheduler reports."""
    if _cancelled(status):
        return replace(known, state="cancelled", exit=Exit.STOPPED if not known.metrics else Exit.FAILED)
    text = output.read_text(errors="replace") if output.exists() else ""
    said = "\n".join(text.strip().splitlines()[-30:]) or "the agent ended without any output; it may have been killed"
    called = "" if status is None or state_of(status.state).by_itself else f"Slurm reports {status.state}\n"
    return replace(known, state="failed", exit=Exit.FAILED, message=called + said)


def resume_command(arguments: Sequence[str], run: RunDirectory, root: str, *, submits: bool = False) -> str:
    """The command that resumes ``run``: the same command line with the run's name; with ``-m`` if ``submits``."""
    name = f"run.name={os.path.relpath(run.path, root)}"
    kept = [part for part in arguments if not part.startswith(("run.name=", "run.fork="))]
    # beside the other overrides: Hydra's parser wants them in one piece, with options before or after
    first = next((index for index, part in enumerate(kept) if "=" in part and not part.startswith("-")), len(kept))
    return shlex.join(["python", "-m", "hpc_train", *(["-m"] if submits else []), *kept[:first], name, *kept[first:]])


def failure_text(run: RunDirectory, end: dict[str, Any]) -> str:
    """The traceback of the failing rank, and why the run was given up."""
    if "class" not in end:
        return str(end.get("message", ""))
    if end["exit_code"] == Exit.REFUSED:
        return end["message"]
    failed = [
        event
        for event in run.read_events()
        if event["event"] == "worker_failed" and event["attempt"] == end["attempt"] and "traceback" in event
    ]
    head = f"rank {end['rank']} on {end['node']} failed ({end['class']}):"
    text = f"{head}\n{failed[0]['traceback'].rstrip()}" if failed else f"{head} {end['message']}"
    return f"{text}\ngiven up: {end['message']}" if end["event"] == "gave_up" else text
