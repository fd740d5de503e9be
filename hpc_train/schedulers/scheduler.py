"""The contract between hpc_train and what runs its jobs; docs/schedulers.md states what each method promises.

``SubmittedJobs`` is what commands ask about submitted jobs. ``Scheduler`` also submits; ``cluster.kind`` names a
user's subclass. Slurm has arrays and chains of jobs and submits with another executor, ``launch/executors/slurm.py``.
``CurrentJob`` is what agents ask about the job that they run in. By default its answers are that nothing is known.
Slurm's are in ``slurm/jobs.py``. Jobs of other schedulers describe themselves by variables (``environment.py``).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from hpc_train.config.extensions import load_row
from hpc_train.config.schema import ClusterConfig
from hpc_train.errors import UserError
from hpc_train.schedulers.states import FORGOTTEN, JobState, Phase, state_of

HELD = re.compile("[Hh]eld|Hold")  # matches Slurm's reasons JobHeldUser, JobHoldMaxRequeue, job requeued in held state


@dataclass(frozen=True)
class JobStatus:
    """Holds the status of one job: its ``state`` as Slurm names it (``states.py``), and why it is pending.

    The state is empty for a process of this machine, and for a job about which its scheduler has not responded yet.
    """

    state: str = ""
    reason: str = ""  # of a pending job; outside Slurm, also of a running one that lacks nodes
    starts: str = ""  # the expected start, 2026-01-31T12:00:00; empty if unknown
    comment: str = ""
    job_id: str = ""  # as squeue prints it: 12, or 12_3 for a task of an array; empty outside Slurm
    part: str = ""  # which job of a chain: "job 18, 2 of 3"
    queried: float = 0.0  # when the scheduler was queried, in seconds since 1970; 0 if it was not

    @property
    def present(self) -> bool:
        """Returns whether the job is pending or running."""
        return state_of(self.state).is_alive

    def _is_in(self, phase: Phase) -> bool:
        return bool(self.state) and state_of(self.state).phase is phase

    @property
    def is_pending(self) -> bool:
        return self._is_in(Phase.PENDING)

    @property
    def is_starting(self) -> bool:
        """Returns whether its nodes are allocated, and are powered up, booted or configured before it runs."""
        return self._is_in(Phase.STARTING)

    @property
    def is_held(self) -> bool:
        """Returns whether the job starts only after ``scontrol release``."""
        return self.is_pending and (state_of(self.state).held or HELD.search(self.reason) is not None)

    @property
    def is_running(self) -> bool:
        return self._is_in(Phase.RUNNING)

    @property
    def is_suspended(self) -> bool:
        """Returns whether the processes of the job are stopped (scontrol suspend, gang scheduling)."""
        return self._is_in(Phase.STOPPED)

    @property
    def words(self) -> str:
        """Returns a phrase for users: "pending (Priority), starts about 01-31 12:00"."""
        text = self.state.lower() or "waiting"
        if self.is_held:
            text = "held"
        if self.part:
            text = f"{self.part}, {text}"
        if self.is_starting:
            return f"{text}, its nodes start"
        if not self.is_pending:
            return text
        if self.reason not in ("", "None"):
            text += f" ({self.reason})"
        if self.starts:
            text += f", starts about {self.starts[5:16].replace('T', ' ')}"
        return text


PRESENT = JobStatus()


@dataclass(frozen=True)
class Reason:
    """Explains why a job is pending. ``fix`` is a change or command that helps, where ``{job}`` is the id of the job.

    Attributes:
        by_size: whether a smaller or shorter job, or another partition of Slurm, would start sooner.
    """

    words: str
    fix: str = ""
    by_size: bool = False


class SubmittedJobs(ABC):
    """Answers questions about submitted jobs and cancels them. Equal objects give equal answers.

    Attributes:
        name: the name of the scheduler in messages.
    """

    name: str

    @abstractmethod
    def statuses(self, ids: Collection[str]) -> Mapping[str, JobStatus] | None:
        """Returns the status of the jobs ``ids``, without those that are no longer known; None without an answer."""

    @abstractmethod
    def cancel(self, ids: Collection[str], *, save: bool = False) -> None:
        """Cancels jobs. With ``save`` it sends the agents SIGUSR1, so that running jobs save a checkpoint and end.

        Raises UserError if a job cannot be cancelled. A job that has ended is skipped.
        """

    def state(self, job_id: str) -> JobState | None:
        """Returns the state of one job; None without an answer."""
        statuses = self.statuses([job_id])
        if statuses is None:
            return None
        return state_of(statuses[job_id].state if job_id in statuses else FORGOTTEN)

    def explain(self, status: JobStatus) -> Reason:
        """Returns why a pending job waits, and what helps."""
        return Reason(f"{self.name} reports {status.reason or 'no reason'}")


class NoAnswer(UserError):
    """Reports a submission without an answer, whose job may exist. Raised by ``Scheduler.submit`` only."""


@dataclass(frozen=True)
class JobRequest:
    """Describes a job to a scheduler.

    Attributes:
        key: identifies the submission; no other one has it. It contains no characters but letters, digits and ``-``.
        name: the name of the job for people, with any characters.
        nodes: the smallest and the largest number of nodes.
        gpus: GPUs per node; 0 for a job on CPUs.
        time_s: the time limit in seconds; None without one.
        lead_s: how many seconds before its time limit the job must begin to save.
        setup: lines of bash that set the environment of an agent: ``cluster.env``, ``cluster.setup``, the frozen code,
            the id of the job and its number of requeues.
        agent: the command that each node of the job runs once, after ``setup``.
        output: the file for the output of the job.
        cluster: the keys of ``cluster``; those of the scheduler itself are in ``cluster.extra``.
    """

    key: str
    name: str
    nodes: tuple[int, int]
    gpus: int
    time_s: int | None
    lead_s: int
    setup: tuple[str, ...]
    agent: tuple[str, ...]
    output: Path
    cluster: ClusterConfig


class Scheduler(SubmittedJobs):
    """Runs jobs, each of which starts one agent per node with the variables of docs/schedulers.md."""

    @abstractmethod
    def script(self, request: JobRequest) -> str:
        """Returns what is submitted: a batch script, or a manifest. Calls no command and writes nothing."""

    @abstractmethod
    def submit(self, request: JobRequest, script: str) -> str:
        """Submits ``script`` and returns the id of the job. A second call with the same ``request.key`` submits nothing
        and returns the same id.

        Raises:
            UserError: the scheduler refuses the job.
            NoAnswer: the scheduler may have accepted the job. The caller repeats the call.
        """

    def check(self, request: JobRequest) -> list[str]:
        """Returns notes about the job. Raises UserError if the scheduler would refuse it or never start it."""
        return []


@cache
def load_scheduler(path: str) -> Scheduler:
    """Returns the scheduler that ``cluster.kind`` names as ``package.module:NAME``.

    Raises UserError if there is none at ``path``, or it lacks a method.
    """
    loaded: Any = load_row(path, "cluster.kind", Scheduler)  # type: ignore[type-abstract]
    scheduler: Scheduler = loaded
    return scheduler


@dataclass(frozen=True)
class TimeLimit:
    """The time limit of a job and its run time, in seconds; None if unknown.

    Attributes:
        is_preempted: whether the scheduler is about to end the job for another one.
    """

    limit_s: float | None = None
    run_s: float | None = None
    is_preempted: bool = False


@dataclass(frozen=True)
class CurrentJob(ABC):
    """The job of this process.

    Attributes:
        scheduler: the name of the scheduler in messages.
        replaces_nodes: whether the scheduler starts the agent of a node again after its loss, while the others run.
        agents_ask: whether the agents request a requeue when they end. Otherwise the batch script does, or the agents
            if it is lost with its node.
        job_id: the id, which stays the same when the job is requeued.
        restart: how often the job was requeued.
        node_rank: the number of this node in the job.
        step_id: the scheduler's id of the step of the agents; None if it has none.
        end_time: the time limit in seconds since 1970, at which the agents stop by themselves; None if the scheduler
            announces the limit with a signal, or there is none.
    """

    scheduler: ClassVar[str]
    replaces_nodes: ClassVar[bool] = False
    agents_ask: ClassVar[bool] = True

    job_id: str
    restart: int
    node_rank: int
    step_id: str | None = None
    end_time: int | None = None

    @property
    def name(self) -> str:
        """The job as the commands of its scheduler name it."""
        return self.job_id

    @abstractmethod
    def why_no_requeue(self) -> str | None:
        """Returns why the job cannot be requeued; None if it can be, or if this is not known."""

    @abstractmethod
    def requeue_command(self, chained: bool) -> Sequence[str]:
        """Returns the command that requests a requeue.

        Args:
            chained: whether another job of a chain (``launch.chain``) continues the run instead.
        """

    @abstractmethod
    def ask(self, command: Sequence[str], exclude: str = "") -> bool:
        """Runs a command of the scheduler; returns whether it succeeds.

        Args:
            exclude: nodes on which the job must not start again, separated by commas, for a requeue command.
        """

    def cancel_command(self) -> Sequence[str]:
        """Returns the command that cancels the job; empty if there is none."""
        return ()

    def is_running(self) -> bool | None:
        """Returns whether the job runs and is neither ended, requeued nor held; None if this is not known."""
        return True

    def limit(self) -> TimeLimit:
        """Returns the time limit of the job, which distinguishes signals of the scheduler and of users."""
        return TimeLimit()

    def exclude(self, names: str) -> None:  # noqa: B027
        """Excludes nodes, separated by commas, from the next start of the job, whose requeue was accepted."""

    def is_current_start(self) -> bool | None:
        """Returns whether the job still runs in its start number ``restart``; None if unknown."""
        return None

    def is_suspended(self) -> bool:
        """Returns whether the job is suspended; False if this is not known."""
        return False

    def was_suspended(self, since: float) -> bool:
        """Returns whether the job was resumed after ``since``, in seconds since 1970; False if this is not known."""
        return False

    def unavailable_nodes(self, names: Sequence[str]) -> dict[str, str]:
        """Returns the nodes in ``names`` that are down, with state and reason."""
        return {}

    def may_start_without(self, excluded: Collection[str], needed: int) -> bool | None:
        """Returns whether there are enough other nodes than ``excluded`` for the job; None if that is not known.

        Args:
            needed: the number of nodes with which it may start.
        """
        return None

    def nodes(self) -> int | None:
        """Returns the number of nodes of the job; None if it is not known."""
        return None

    def why_no_release(self) -> str | None:
        """Returns why the running job cannot give back single nodes; None if it can."""
        return f"{self.scheduler} does not take back single nodes of a running job"

    def release(self, names: Collection[str], job_id: str | None = None) -> str | None:
        """Gives back the nodes ``names``, whose agents have ended; returns why this failed, None if it did not.

        Args:
            job_id: the job that holds them; this one by default.
        """
        return self.why_no_release()

    def why_no_joiner(self) -> str | None:
        """Returns why a second job cannot add nodes to the run; None if it can."""
        return f"a job of {self.scheduler} cannot get more nodes"

    def note(self, text: str, replaced: re.Pattern[str]) -> None:  # noqa: B027
        """Appends ``text`` to the comment of the job, instead of a match of ``replaced``."""
