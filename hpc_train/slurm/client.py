"""Runs all of Slurm's commands that Python uses, with one policy for waiting and errors.

Each command has one of three time limits. ``SlurmError.problem`` distinguishes a command that is missing, a controller
that does not respond, and a refusal. A query is not repeated: its caller continues without the answer, or asks again at
its own interval. Neither is a submission, since one whose answer is lost may have been accepted. ``cancel``, which may
safely be sent twice, is repeated once.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from hpc_train.errors import UserError
from hpc_train.slurm.states import FORGOTTEN, JobState, Phase, state_of

BRIEF_S = 5.0  # for a query inside a job that has little time left, or that is merely nice to have
QUERY_S = 20.0  # for any other query: a controller under load takes seconds
PATIENT_S = 120.0  # for a submission, a cancellation, a requeue, and for watching jobs: giving up early gains nothing
REPEAT_AFTER_S = 5.0
UNREACHABLE = (
    "Unable to contact slurm controller",
    "Unable to establish controller",
    "Socket timed out",
    "Connection refused",
    "Connection timed out",
    "Zero Bytes were transmitted",
)
CLOCKS_S = 60.0  # by which the clocks of two machines may differ
UNUSABLE = ("down", "drain", "fail", "unknown")
UNKNOWN_JOB = "Invalid job id"
FORMAT = "%i|%T|%S|%k|%r"  # id, state, (expected) start, comment, reason
KEPT = ("SLURM_CONF",)  # says which cluster this is, not which job

Query = Callable[[Sequence[str]], str | None]


class Problem(StrEnum):
    """Says why a command of Slurm gave no answer."""

    MISSING = "missing"  # the command is not on the PATH
    SILENT = "silent"  # the controller, or the database, does not respond
    REFUSED = "refused"


FIXES = {
    Problem.MISSING: "run it on a login node, or load the site's Slurm module",
    Problem.SILENT: "try again when the controller responds (scontrol ping)",
    Problem.REFUSED: "correct what the message names",
}


class SlurmError(UserError):
    """A command of Slurm that failed.

    Attributes:
        said: what it wrote to standard error.
        output: what it wrote to standard output nevertheless.
    """

    def __init__(self, command: str, problem: Problem, said: str, output: str = "") -> None:
        super().__init__(f"{command} failed: {said}", where=command, fix=FIXES[problem])
        self.problem, self.said, self.output = problem, said, output


def run(
    command: Sequence[str],
    *,
    timeout_s: float = QUERY_S,
    stdin: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Runs a command of Slurm and returns its standard output.

    Raises:
        SlurmError: it is missing, takes longer than ``timeout_s`` seconds, or exits with another code than 0.
    """
    return _completed(command, timeout_s=timeout_s, stdin=stdin, environment=environment).stdout


def _completed(
    command: Sequence[str], *, timeout_s: float, stdin: str | None, environment: Mapping[str, str] | None
) -> subprocess.CompletedProcess[str]:
    name = command[0]
    try:
        done = subprocess.run(
            command,
            input=stdin,
            env=environment,
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # comments on jobs are in any encoding
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SlurmError(name, Problem.SILENT, f"no answer within {timeout_s:g} s") from None
    except OSError as error:
        raise SlurmError(name, Problem.MISSING, str(error)) from error
    if done.returncode == 0:
        return done
    said = done.stderr.strip() or f"exit code {done.returncode}"
    unreachable = any(text in said for text in UNREACHABLE)
    problem = Problem.SILENT if unreachable else Problem.REFUSED
    raise SlurmError(name, problem, said, done.stdout)


def query(command: Sequence[str], timeout_s: float = QUERY_S) -> str | None:
    """Returns the standard output of a command; None if it fails, for callers that can continue without it."""
    try:
        return run(command, timeout_s=timeout_s)
    except SlurmError:
        return None


def controller_responds() -> bool:
    """Returns whether a controller is up (``scontrol ping``)."""
    return " is UP" in (query(["scontrol", "ping"]) or "")


@dataclass(frozen=True)
class QueuedJob:
    """A job as ``squeue`` prints it. ``starts`` is empty if no start is expected: 2026-01-31T12:00:00."""

    job_id: str
    state: str
    starts: str
    comment: str
    reason: str


def list_jobs(selection: Sequence[str], timeout_s: float = PATIENT_S) -> list[QueuedJob] | None:
    """Returns the jobs that the options ``selection`` of ``squeue`` select, one for each task of an array (``12_3``).

    ``squeue`` responds on sites without accounting too, and knows a job for minutes after its end.

    Returns:
        None if Slurm does not respond.
    """
    command = ["squeue", "--noheader", "--array", "--states=all", f"--format={FORMAT}", *selection]
    try:
        text = run(command, timeout_s=timeout_s)
    except SlurmError as error:
        if UNKNOWN_JOB not in error.said:
            return None
        text = error.output
    return [_queued(line) for line in text.splitlines() if line.count("|") >= 4]  # not the title line of a cluster


def _queued(line: str) -> QueuedJob:
    job_id, state, starts, rest = line.split("|", 3)
    comment, _, reason = rest.rpartition("|")
    starts = "" if starts in ("N/A", "NONE") else starts
    return QueuedJob(job_id, state, starts, "" if comment == "(null)" else comment, reason)


def job_state(job_id: str, clusters: str | None = None) -> JobState | None:
    """Returns the state of one job; None if Slurm does not respond.

    Args:
        clusters: other clusters than this machine's, where the same id may belong to another user's job.
    """
    command = ["squeue", "--noheader", "--jobs", job_id, "--format", "%T", *on_clusters(clusters)]
    try:
        text = run([*command, *(["--me"] if clusters else [])])
    except SlurmError as error:
        return state_of(FORGOTTEN) if UNKNOWN_JOB in error.said else None
    states = [line.strip() for line in text.splitlines() if not line.startswith("CLUSTER:")]
    return state_of(next(filter(None, states), FORGOTTEN))


def state_and_priority(job_id: str) -> tuple[JobState, int] | None:
    """Returns the state of one job and its priority, which is 0 while it is held; None if Slurm does not respond."""
    text = query(["squeue", "--noheader", f"--jobs={job_id}", "--format=%T %Q"])
    if text is None:
        return None
    state, priority = [*text.split(), FORGOTTEN, "0"][:2]
    return state_of(state), int(priority)


def own_job(environment: Mapping[str, str] = os.environ) -> str:
    """Returns the job of this process, as Slurm's commands name it: ``12``, or ``12_3`` for a task of an array.

    For ``SLURM_JOB_ID`` alone the commands would show the whole array if this process is in its last task.
    """
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environment["SLURM_JOB_ID"]


def is_suspended() -> bool:
    """Returns whether the job of this process is suspended; False if Slurm does not respond."""
    state = job_state(own_job())
    return state is not None and state.phase is Phase.STOPPED


def was_suspended(since: float) -> bool:
    """Returns whether Slurm has resumed the job of this process after ``since``, in seconds since 1970.

    The clock of the controller may be a minute off. False if Slurm does not respond.
    """
    shown = query(["scontrol", "show", "job", own_job()], BRIEF_S) or ""
    found = re.search(r"\bSuspendTime=(\d{4}-\d\d-\d\dT\S+)", shown)  # when it was last suspended or resumed
    return found is not None and time.mktime(time.strptime(found[1], "%Y-%m-%dT%H:%M:%S")) > since - CLOCKS_S


def is_current_start(restart: int) -> bool | None:
    """Returns whether the job of this process still runs in its start number ``restart``; None if unknown."""
    shown = query(["scontrol", "show", "job", own_job()], BRIEF_S) or ""
    state, restarts = re.search(r"\bJobState=(\w+)", shown), re.search(r"\bRestarts=(\d+)", shown)
    if state is None or restarts is None:
        return None
    return state_of(state[1]).phase in (Phase.RUNNING, Phase.STOPPED) and int(restarts[1]) <= restart


def unavailable_nodes(names: Sequence[str]) -> dict[str, str]:
    """Returns those of ``names`` that are down, with their state and its reason; {} if Slurm does not respond."""
    call = ["sinfo", "--noheader", "--Node", f"--nodes={','.join(names)}", "--format=%N|%T|%E"]
    rows = [line.split("|", 2) for line in (query(call, BRIEF_S) or "").splitlines() if line.count("|") >= 2]
    return {node: f"{state.rstrip('*')} ({reason.strip()})" for node, state, reason in rows if state.startswith("down")}


def usable_nodes(partition: str) -> set[str] | None:
    """Returns the nodes of a partition that are neither down nor drained; None if Slurm does not respond."""
    text = query(["sinfo", "--noheader", "--Node", f"--partition={partition}", "--format=%N %T"], BRIEF_S)
    rows = [line.split() for line in (text or "").splitlines()]
    return {row[0] for row in rows if len(row) == 2 and not row[1].startswith(UNUSABLE)} if text else None


def extend_comment(text: str, replaced: re.Pattern[str]) -> None:
    """Appends ``text`` to the comment of the job of this process. Without an answer of Slurm it changes nothing.

    Args:
        replaced: what an earlier start of the job has appended, which ``text`` replaces.
    """
    own = own_job()
    jobs = list_jobs([f"--jobs={own}"], BRIEF_S)
    if jobs:
        comment = f"{replaced.sub('', jobs[0].comment)} {text}".strip()
        query(["scontrol", "update", f"JobId={own}", f"Comment={comment}"], BRIEF_S)


def may_requeue(job_id: str) -> bool:
    """Returns whether Slurm would requeue the job; also True if Slurm's commands fail, as in a container."""
    return "Requeue=0" not in (query(["scontrol", "show", "job", job_id], BRIEF_S) or "").split()


def show_job(job_id: str) -> str:
    """Returns the output of ``scontrol show job`` with the nodes of the job; empty if it fails."""
    return query(["scontrol", "show", "job", "--details", job_id]) or ""


def show_nodes(names: Collection[str] = (), timeout_s: float = QUERY_S) -> str:
    """Returns the output of ``scontrol show node`` for ``names`` or all nodes, one per line; empty if it fails."""
    selected = [",".join(names)] if names else []
    return query(["scontrol", "show", "node", "--oneliner", *selected], timeout_s) or ""


def show_topology() -> str:
    """Returns the output of ``scontrol show topology``; empty if it fails."""
    return query(["scontrol", "show", "topology"], BRIEF_S) or ""


def on_clusters(clusters: str | None) -> list[str]:
    """Returns the option of Slurm's commands for jobs that went to other clusters."""
    return [f"--clusters={clusters}"] if clusters else []


def cancel(ids: Collection[str], *, signal: str | None = None, clusters: str | None = None) -> None:
    """Cancels jobs, or sends their steps ``signal`` (``USR1``).

    Raises:
        SlurmError: Slurm refuses, or does not respond twice in a row.
    """
    if not ids:
        return
    command = ["scancel", *on_clusters(clusters), *([f"--signal={signal}"] if signal else []), *ids]
    try:
        run(command, timeout_s=PATIENT_S)
    except SlurmError as error:
        if error.problem is not Problem.SILENT:
            raise
        time.sleep(REPEAT_AFTER_S)
        run(command, timeout_s=PATIENT_S)


def submit(options: Sequence[str], script: str) -> str:
    """Submits a batch script and returns the id of the job.

    Raises:
        SlurmError: Slurm does not take it.
    """
    printed = _sbatch(["--parsable", *options], script).stdout
    return printed.strip().partition(";")[0]


ESTIMATE = re.compile(r"sbatch: Job \S+ to start at (\S+)")


@dataclass(frozen=True)
class Check:
    """Holds what ``sbatch --test-only`` answers for a job that the controller would take.

    Attributes:
        lines: what sbatch and the submit plugins of the site print, without the expected start.
        starts: the expected start in seconds since 1970; None if Slurm does not tell it.
    """

    lines: list[str]
    starts: float | None


def check_submission(options: Sequence[str], timeout_s: float = PATIENT_S) -> Check:
    """Asks the controller whether it would take a job with these options, and when the job would start.

    Raises:
        SlurmError: it would not.
    """
    done = _sbatch([*options, "--test-only"], "#!/bin/sh\ntrue\n", timeout_s)
    said = [line for line in done.stderr.splitlines() if line.strip()]
    starts = [local_time(found[1]) for line in said if (found := ESTIMATE.match(line))]
    return Check([line for line in said if not ESTIMATE.match(line)], next(iter(starts), None))


def local_time(text: str) -> float | None:
    """Returns a time as Slurm prints it, in seconds since 1970; None for ``Unknown``, ``None`` and ``N/A``."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def _sbatch(options: Sequence[str], script: str, timeout_s: float = PATIENT_S) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in inherited_variables()}
    return _completed(["sbatch", *options], stdin=script, environment=environment, timeout_s=timeout_s)


def inherited_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the variables of a surrounding job, which a submission must not pass on; none outside of a job.

    ``SLURM_CPUS_PER_TASK`` and its like would reach the steps of the new job and contradict its own options.
    """
    if "SLURM_JOB_ID" not in environment:
        return []
    prefixes = ("SLURM_", "SBATCH_", "SRUN_")
    return sorted(name for name in environment if name.startswith(prefixes) and name not in KEPT)


LAST_STEP_ID = 0xFFFFFFF0  # SLURM_MAX_NORMAL_STEP_ID of slurm.h; batch scripts and shells of salloc are above it


def is_in_step(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether this process belongs to a step that srun has started, e.g. ``srun --pty bash``.

    Another srun waits for the resources of this step, unless it has the option ``--overlap``.
    """
    step = environment.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) <= LAST_STEP_ID


def preset(option: str) -> str | None:
    """Returns the value that ``SBATCH_*`` sets for an option which a submission does not have; None without one."""
    name = f"SBATCH_{option.upper()}"
    return None if name in inherited_variables() else os.environ.get(name) or None


def inner_step_environment() -> dict[str, str]:
    """Returns the environment for an srun within a step, whose own variables would become options of the inner step."""
    kept = (*KEPT, "SLURM_JOB_ID", "SLURM_JOBID")
    variables = os.environ.items()
    return {name: value for name, value in variables if name in kept or not name.startswith(("SLURM_", "SRUN_"))}
