"""Runs all of Slurm's commands that Python uses, with one policy for waiting and errors.

Each command has one of three time limits. ``SlurmError.problem`` distinguishes a command that is missing, a controller
that does not respond, and a refusal. A query is not repeated: its caller continues without the answer, or asks again at
its own interval. Neither is a submission, since one whose answer is lost may have been accepted. ``cancel``, which may
safely be sent twice, is repeated once.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from functools import cache
from typing import ParamSpec, TypeVar

from hpc_train.config.schema import ClusterConfig
from hpc_train.errors import UserError
from hpc_train.opening import tell_once
from hpc_train.schedulers.scheduler import JobStatus
from hpc_train.schedulers.slurm.records import NODE_STATES, JobRecord, NodeRecord, NodeState, time_of
from hpc_train.schedulers.slurm.variables import Receiver, environment_for, withheld
from hpc_train.schedulers.states import FORGOTTEN, JobState, state_of

BRIEF_S = 5.0  # for an optional query, or a query inside a job that has little time left
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
# the connection has failed, so the controller has not received the request
NOT_SENT = ("connect failure", "Unable to establish controller", "Connection refused")
LOOKS = 3  # searches for a job whose submission was not answered; the controller may still be busy with it
CLOCKS_S = 60.0  # the largest assumed difference between the clocks of two machines
UNKNOWN_JOB = "Invalid job id"

Query = Callable[[Sequence[str]], str | None]
Asked = ParamSpec("Asked")
T = TypeVar("T")


class Problem(StrEnum):
    """Names the reason why a command of Slurm failed."""

    MISSING = "missing"  # the command is not on the PATH
    SILENT = "silent"  # the controller, or the database, does not respond
    REFUSED = "refused"


FIXES = {
    Problem.MISSING: "run it on a login node, or load the site's Slurm module",
    Problem.SILENT: "try again when the controller responds (scontrol ping)",
    Problem.REFUSED: "correct what the message names",
}


class SlurmError(UserError):
    """Reports that a command of Slurm failed.

    Attributes:
        said: the standard error of the command.
        output: the standard output of the command.
    """

    def __init__(self, command: str, problem: Problem, said: str, output: str = "") -> None:
        super().__init__(f"{command} failed: {said}", where=command, fix=FIXES[problem])
        self.problem = problem
        self.said = said
        self.output = output


def run(
    command: Sequence[str],
    *,
    timeout_s: float = QUERY_S,
    stdin: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Runs a command of Slurm and returns its standard output.

    Raises SlurmError if it is missing, takes longer than ``timeout_s`` seconds, or exits with another code than 0.
    Without ``environment``, the command gets the variables of this process that may reach a query (``variables.py``).
    """
    return _completed(command, stdin, environment, timeout_s).stdout


def _completed(
    command: Sequence[str], stdin: str | None, environment: Mapping[str, str] | None, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    name = command[0]
    if environment is None:
        environment = environment_for(Receiver.QUERY)
    try:
        done = subprocess.run(
            command,
            input=stdin,
            env=environment,
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # comments on jobs may be in any encoding
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SlurmError(name, Problem.SILENT, f"no answer within {timeout_s:g} s") from None
    except OSError as error:
        raise SlurmError(name, Problem.MISSING, str(error)) from error
    if done.returncode == 0:
        return done
    raise failure(name, done.stderr.strip() or f"exit code {done.returncode}", done.stdout)


def failure(command: str, said: str, output: str = "") -> SlurmError:
    """Returns the error for a command that has failed with ``said`` on standard error."""
    problem = Problem.REFUSED
    if any(text in said for text in UNREACHABLE):
        problem = Problem.SILENT
    return SlurmError(command, problem, said, output)


def query(command: Sequence[str], timeout_s: float = QUERY_S) -> str | None:
    """Returns the standard output of a command; None if it fails, for callers that can continue without it."""
    try:
        return run(command, timeout_s=timeout_s)
    except SlurmError:
        return None


NO_CONFIGURATION = "Could not establish a configuration source"  # neither slurm.conf nor a controller is found


class Controller(Enum):
    """Describes whether this machine has a Slurm controller."""

    UP = auto()
    ABSENT = auto()  # there is no sbatch
    UNCONFIGURED = auto()  # Slurm's commands find no cluster: they are installed on a machine that belongs to none
    SILENT = auto()  # there is a cluster, but its controller does not respond


def find_controller() -> tuple[Controller, str]:
    """Finds the controller of this machine; returns its state, and the messages of Slurm's commands if it is not up.

    Some sites do not allow users ``scontrol ping``. ``sinfo`` and ``squeue`` then decide.
    """
    if shutil.which("sbatch") is None:
        return Controller.ABSENT, "sbatch is not on the PATH"
    said = []
    for command in (["scontrol", "ping"], ["sinfo", "--noheader", "--format=%P"], ["squeue", "--noheader", "--me"]):
        try:
            answer = run(command)
        except SlurmError as error:
            last = (error.said.splitlines() or [""])[-1]  # mostly with the name of the command
            said.append(f"{command[0]}: {last.removeprefix(f'{command[0]}: ')}")
            if NO_CONFIGURATION in error.said and "SLURM_CONF" not in os.environ:
                return Controller.UNCONFIGURED, said[0]
            if " is DOWN" in error.output:
                return Controller.SILENT, f"{command[0]}: {error.output.splitlines()[0]}"
            if error.problem is Problem.SILENT:
                return Controller.SILENT, said[-1]
        else:
            if command[0] != "scontrol" or " is UP" in answer:
                return Controller.UP, ""
            said.append(f"scontrol: {answer.strip()}")
    return Controller.SILENT, "; ".join(said)


def _squeue(*options: str, timeout_s: float = QUERY_S) -> list[str] | None:
    """Returns the lines that squeue prints, none for a job that Slurm has forgotten; None if it does not respond."""
    try:
        text = run(["squeue", "--noheader", *options], timeout_s=timeout_s)
    except SlurmError as error:
        if UNKNOWN_JOB not in error.said:
            return None
        text = error.output
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("CLUSTER:")]


def list_jobs(selection: Sequence[str], timeout_s: float = PATIENT_S) -> list[JobStatus] | None:
    """Returns the jobs that the options ``selection`` of ``squeue`` select, one for each task of an array (``12_3``).

    ``squeue`` responds on sites without accounting too, and knows a job for minutes after its end. Returns None if
    Slurm does not respond.
    """
    now = time.time()
    lines = _squeue("--array", "--states=all", "--format=%i|%T|%S|%k|%r", *selection, timeout_s=timeout_s)
    if lines is None:
        return None
    jobs = []
    for line in lines:
        if line.count("|") >= 4:
            job_id, state, starts, rest = line.split("|", 3)
            job_id, _, component = job_id.partition("+")
            if component not in ("", "0"):
                continue  # the first component stands for a heterogeneous job
            comment, _, reason = rest.rpartition("|")
            starts = starts.replace("N/A", "").replace("NONE", "")
            comment = comment.removeprefix("(null)")
            jobs.append(JobStatus(state, reason, starts, comment, job_id=job_id, queried=now))
    return jobs


def job_state(job_id: str, clusters: str | None = None) -> JobState | None:
    """Returns the state of one job; None if Slurm does not respond.

    ``clusters`` names other clusters than this machine's, where the same id may belong to another user's job.
    """
    others = ["--me", *on_clusters(clusters)] if clusters else []
    lines = _squeue("--jobs", job_id, "--format", "%T", *others)
    return None if lines is None else state_of([*lines, FORGOTTEN][0])


def own_job(environment: Mapping[str, str] = os.environ) -> str:
    """Returns the job of this process, as Slurm's commands name it: ``12``, or ``12_3`` for a task of an array.

    For ``SLURM_JOB_ID`` alone the commands would show the whole array if this process is in its last task.
    """
    array = environment.get("SLURM_ARRAY_JOB_ID")
    task = environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environment["SLURM_JOB_ID"]


def node_states(selection: Sequence[str], timeout_s: float = BRIEF_S) -> list[NodeState]:
    """Returns the nodes that the options ``selection`` of ``sinfo`` select; none if Slurm does not respond."""
    return NodeState.read_all(query([*NODE_STATES, *selection], timeout_s) or "")


def show_job(job_id: str, *options: str, timeout_s: float = QUERY_S) -> JobRecord:
    """Returns the record of the job in ``scontrol``; empty if ``scontrol`` fails."""
    return JobRecord.read(query(["scontrol", "show", "job", *options, job_id], timeout_s) or "")


def show_nodes(names: Collection[str] = (), timeout_s: float = QUERY_S) -> list[NodeRecord]:
    """Returns ``names`` or all nodes; none if Slurm does not respond."""
    selected = [",".join(names)] if names else []
    return NodeRecord.read_all(query(["scontrol", "show", "node", "--oneliner", *selected], timeout_s) or "")


def show_topology() -> str:
    """Returns the output of ``scontrol show topology``; empty if it fails."""
    return query(["scontrol", "show", "topology"], BRIEF_S) or ""


def on_clusters(clusters: str | None) -> list[str]:
    """Returns the option of Slurm's commands for jobs that went to other clusters."""
    return [f"--clusters={clusters}"] if clusters else []


def cancel(ids: Collection[str], *, signal: str | None = None, clusters: str | None = None) -> None:
    """Cancels jobs, or sends their steps ``signal`` (``USR1``).

    Raises SlurmError if Slurm refuses, or does not respond twice in a row.
    """
    if not ids:
        return
    command = ["scancel", *on_clusters(clusters)]
    if signal:
        command.append(f"--signal={signal}")
    command += ids
    try:
        run(command, timeout_s=PATIENT_S)
    except SlurmError as error:
        if error.problem is not Problem.SILENT:
            raise
        time.sleep(REPEAT_AFTER_S)
        run(command, timeout_s=PATIENT_S)


def submit(options: Sequence[str], script: str, comment: str, clusters: str | None = None) -> str:
    """Submits a batch script and returns the id of the job.

    Raises SlurmError if Slurm rejects it. No other job has this ``comment``.
    """

    def send() -> str:
        return job_in_answer(_sbatch(["--parsable", f"--comment={comment}", *options], script).stdout)

    return submitted_job(send, comment, clusters=clusters)


SENTENCE = re.compile(r"\bSubmitted batch job (\d+)\b")
PARSABLE = re.compile(r"^\s*(\d+)(?:;\S*)?\s*$", re.MULTILINE)


def job_in_answer(printed: str) -> str:
    """Returns the id of the job in the output of ``sbatch --parsable``, to which a site's wrapper may add lines.

    Raises SlurmError if there is no id, or it is ambiguous which number is the id.
    """
    ids = set(SENTENCE.findall(printed)) or set(PARSABLE.findall(printed))
    if len(ids) != 1:
        said = f"exit code 0, but it does not print the id of one job: {printed.strip()!r}"
        raise SlurmError("sbatch", Problem.SILENT, said, printed)
    return ids.pop()


class LostAnswer(SlurmError):
    """Reports a submission whose answer is lost, and whose job is not in the queue, or whose queue cannot be read."""

    def __init__(self, said: str, comment: str, *, queue_is_known: bool) -> None:
        super().__init__("sbatch", Problem.SILENT, said)
        queue = "squeue does not respond either, and the job may be queued"
        if queue_is_known:
            queue = "squeue shows no job of this submission, but it may still appear"
        self.what = f"sbatch failed, and Slurm may have accepted the job: {said}; {queue}"
        self.fix = (
            f"look for it before you submit again: squeue --me --format='%i %T %k' | grep -F {shlex.quote(comment)}; "
            "scancel ID cancels it"
        )


def submitted_job(
    send: Callable[[], str], comment: str, others: Collection[str] = (), clusters: str | None = None
) -> str:
    """Submits a job and returns its id. If the answer is lost, the job is found in the queue by its comment.

    An interrupted submission is cancelled.

    Args:
        send: submits the job and returns its id; raises SlurmError.
        comment: the comment of the job.
        others: the ids of other jobs with this comment.

    Raises:
        SlurmError: Slurm rejects the job.
        LostAnswer: it is unknown whether Slurm has accepted the job.
    """
    try:
        return send()
    except SlurmError as error:
        is_sent = error.problem is Problem.SILENT and not any(text in error.said for text in NOT_SENT)
        if not is_sent and not re.search(r"\d", error.output):
            raise
        lost = error
    except BaseException:
        for job_id in _jobs_with(comment, others, clusters) or ():
            print(f"cancelling job {job_id}, which was just submitted", file=sys.stderr)
            cancel([job_id], clusters=clusters)
        raise
    ids = _jobs_with(comment, others, clusters)
    for _ in range(LOOKS - 1):
        if not ids:
            time.sleep(REPEAT_AFTER_S)
            ids = _jobs_with(comment, others, clusters)
    if not ids:
        if lost.problem is Problem.REFUSED and ids is not None:
            raise lost
        raise LostAnswer(lost.said, comment, queue_is_known=ids is not None) from lost
    first, *doubles = ids
    print(f"note: the answer of sbatch was lost ({lost.said}); its job {first} is in the queue", file=sys.stderr)
    if doubles:
        print(f"cancelling other jobs of the same submission: {', '.join(doubles)}", file=sys.stderr)
        cancel(doubles, clusters=clusters)
    return first


def _jobs_with(comment: str, others: Collection[str], clusters: str | None) -> list[str] | None:
    """Returns the jobs of this user with ``comment`` that have not ended, arrays as one; None if Slurm is silent."""
    jobs = list_jobs(["--me", *on_clusters(clusters)], QUERY_S)
    if jobs is None:
        return None
    ids = {job.job_id.partition("_")[0] for job in jobs if job.comment == comment and state_of(job.state).is_alive}
    return sorted(ids - set(others), key=int)


ESTIMATE = re.compile(r"^sbatch: Job \S+ to start at (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Check:
    """Holds the answer of ``sbatch --test-only`` for a job that the controller would accept.

    Attributes:
        lines: the output of sbatch and of the site's submit plugins, without the expected start.
        starts: the expected start in seconds since 1970; None if Slurm does not report it.
    """

    lines: list[str]
    starts: float | None


def check_submission(options: Sequence[str], timeout_s: float = PATIENT_S) -> Check:
    """Asks the controller whether it would accept a job with these options, and when the job would start.

    Raises SlurmError if it would not.
    """
    done = _sbatch([*options, "--test-only"], "#!/bin/sh\ntrue\n", timeout_s)
    lines = [line for line in done.stderr.splitlines() if line.strip() and not ESTIMATE.match(line)]
    estimate = ESTIMATE.search(done.stderr)
    return Check(lines, time_of(estimate[1]) if estimate else None)


def _sbatch(options: Sequence[str], script: str, timeout_s: float = PATIENT_S) -> subprocess.CompletedProcess[str]:
    return _completed(["sbatch", *options], script, environment_for(Receiver.SBATCH), timeout_s)


LAST_STEP_ID = 0xFFFFFFF0  # SLURM_MAX_NORMAL_STEP_ID of slurm.h; batch scripts and shells of salloc are above it


def is_in_step() -> bool:
    """Returns whether this process belongs to a step that srun has started, e.g. ``srun --pty bash``.

    Another srun waits for the resources of this step, unless it has the option ``--overlap``.
    """
    step = os.environ.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) <= LAST_STEP_ID


def in_allocation() -> bool:
    """Returns whether this process runs inside a Slurm job and can start steps in it."""
    return _has_job() and not _job_has_ended()


def check_shell(cluster: ClusterConfig) -> None:
    """Raises UserError in the shell of an ended job, such as a shell of tmux, if ``cluster=auto`` would use the job.

    With another ``cluster.kind``, the variables of the job are removed from this process, since a run would otherwise
    treat the job as its own.
    """
    if not _has_job() or not _job_has_ended():
        return
    job_id = os.environ["SLURM_JOB_ID"]
    if cluster.kind == "auto":
        raise UserError(
            f"this shell belongs to Slurm job {job_id}, which has ended",
            where="SLURM_JOB_ID, cluster.kind",
            fix="unset SLURM_JOB_ID; or cluster=slurm -m submits a new job; or cluster=local trains on this machine",
        )
    print(f"note: the variables of Slurm job {job_id}, which has ended, are not used", file=sys.stderr)
    for name in withheld(Receiver.SBATCH):
        if name.startswith(("SLURM_", "SRUN_")):
            del os.environ[name]


def _has_job() -> bool:
    return "SLURM_JOB_ID" in os.environ and shutil.which("srun") is not None


def _job_has_ended() -> bool:
    """Returns whether the job of this shell has ended; False if Slurm does not respond."""
    state = _state_once(own_job())
    return state is not None and not state.is_alive


def asked_once(ask: Callable[Asked, T]) -> Callable[Asked, T]:
    """Caches the answers of ``ask`` per process, PATH and SLURM_CONF, which select the commands and the controller."""
    answer: Callable[..., T] = cache(lambda path, conf, *args, **options: ask(*args, **options))

    def once(*args: Asked.args, **options: Asked.kwargs) -> T:
        return answer(os.environ.get("PATH"), os.environ.get("SLURM_CONF"), *args, **options)

    return once


_state_once = asked_once(job_state)
_controller_once = asked_once(find_controller)
_answer_once = asked_once(query)


def uses_slurm() -> bool:
    """Returns whether ``cluster=auto`` submits to Slurm outside of an allocation, because a controller responds.

    Raises UserError if there is a cluster whose controller does not respond, so that this may be a login node.
    """
    controller, said = _controller_once()
    if controller is Controller.UNCONFIGURED:
        no_cluster = "Slurm's commands are on this machine, but find no cluster"
        tell_once(f"note: {no_cluster}: training on this machine ({said})")
    if controller is Controller.SILENT:
        raise UserError(
            f"Slurm is installed on this machine, but its controller does not respond: {said}",
            where="cluster.kind=auto" + (", SLURM_CONF" if "SLURM_CONF" in os.environ else ""),
            fix="try again when the controller responds (scontrol ping), or cluster=local to train on this machine",
        )
    return controller is Controller.UP


def require_version(least: tuple[int, int], setting: str) -> None:
    """Raises UserError if ``scontrol version`` is older than ``least``, or unknown.

    Args:
        setting: the setting that needs the version: ``cluster.requeue=expedite``.
    """
    version = (_answer_once(("scontrol", "version")) or "").strip()
    numbers = re.search(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < least:
        major, minor = least
        raise UserError(
            f"{setting} needs Slurm {major}.{minor:02d} or newer, and `scontrol version` prints {version or 'nothing'}",
            where=setting,
            fix=f"remove {setting}",
        )


def controller_answers() -> bool:
    """Returns whether ``sbatch`` exists and a Slurm controller is up; cached per process."""
    return _controller_once()[0] is Controller.UP
