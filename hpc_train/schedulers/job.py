"""What agents ask the scheduler about the job that they run in.

By default, the answers of ``CurrentJob`` are that nothing is known. Slurm's are in ``slurm/job.py``, those of jobs of
other schedulers, which describe themselves by variables, in ``environment.py``.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


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

    def usable_nodes(self) -> set[str] | None:
        """Returns the nodes on which the job may start again; None if they are not known."""
        return None

    def nodes(self) -> int | None:
        """Returns the number of nodes of the job; None if it is not known."""
        return None

    def note(self, text: str, replaced: re.Pattern[str]) -> None:  # noqa: B027
        """Appends ``text`` to the comment of the job, instead of a match of ``replaced``."""
