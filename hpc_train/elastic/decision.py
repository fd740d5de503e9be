"""What is done when an attempt has ended: a function of how it ended and of the attempts before it.

Which of several failures came first: when one rank fails, the others fail too, of connections that it closed.

``run.max_gpu_hours``: a run at work that has used them up is asked to stop, saves, and is not started again.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hpc_train.config.schema import Config
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import RESPONSES, Action, Exit, Failure
from hpc_train.run.ledger import read_ledger

ANNOUNCEMENT = "SIGUSR2"  # how Slurm announces the time limit and a preemption; other signals are somebody's wish
ATTEMPTS_WITHOUT_A_STEP = 3


@dataclass(frozen=True)
class Ended:
    """How an attempt ended on all of its nodes.

    Attributes:
        failure: the class of its cause; None where nothing failed.
        step: the furthest that it got.
        stop: the signal that asked the run to stop; None without one.
        first: whether the run has not failed like this before, and the node may be to blame.
    """

    exit: Exit
    failure: Failure | None
    step: int
    stop: str | None = None
    first: bool = False


@dataclass(frozen=True)
class History:
    """The attempts of this job so far: the furthest step, and how many in a row have not gone beyond it."""

    furthest: int
    fruitless: int = 0

    def after(self, step: int) -> History:
        """With one more attempt, which got to ``step``."""
        return History(step) if step > self.furthest else History(self.furthest, self.fruitless + 1)


@dataclass(frozen=True)
class RestartDecision:
    """An action, and why in words."""

    action: Action
    reason: str = ""


def decide(history: History, ended: Ended) -> RestartDecision:
    """``history`` holds the attempts before the one that ``ended``."""
    if ended.failure is None:
        stopped = Action.REQUEUE if ended.stop == ANNOUNCEMENT else Action.STOP
        return RestartDecision(Action.FINISH if ended.exit is Exit.DONE else stopped)
    response, after = RESPONSES[ended.failure], history.after(ended.step)
    action = response.action
    if action is Action.RESTART_IF_FURTHER:
        action = Action.FAIL if after.fruitless and not ended.first else Action.RESTART
    if action not in (Action.RESTART, Action.REPLACE):
        return RestartDecision(action, response.advice)
    if ended.stop is not None:
        return RestartDecision(Action.REQUEUE if ended.stop == ANNOUNCEMENT else Action.FAIL)
    if after.fruitless >= ATTEMPTS_WITHOUT_A_STEP:
        return RestartDecision(Action.GIVE_UP, f"no new step in {after.fruitless} attempts. {response.advice}".strip())
    return RestartDecision(action)


@dataclass(frozen=True)
class WorkerFailure:
    """How one worker failed.

    Attributes:
        message: one line.
        traceback: the worker's own, or the last lines of its output where it died without one.
        noticed: seconds since the epoch: the worker's own time where it could tell.
        exit_code: negative for a signal, None where the worker reported before it ended.
        waits: of a hang: no rank of this node is behind, so all of them wait for another node's. Of a failure that all
            ranks raise together: another rank is the one to name.
        states: of a hang: what is known of each rank of this node (``culprit.RankState``), as plain data.
    """

    rank: int
    failure: Failure
    message: str
    traceback: str
    noticed: float
    exit_code: int | None = None
    waits: bool = False
    states: tuple[dict[str, Any], ...] = ()


def root_cause(failures: Iterable[WorkerFailure]) -> WorkerFailure:
    """The earliest failure that is not an echo of another rank's."""
    return min(failures, key=lambda failure: (_echo(failure), failure.noticed))


def is_secondary(failure: WorkerFailure) -> bool:
    """Whether it tells of another rank's failure rather than of one of its own."""
    return _echo(failure) > 0


def _echo(failure: WorkerFailure) -> int:
    """0: a cause; 1: an abort, as communication libraries do when a peer is gone; 2: a communication error.

    An abort that told of the rank's own GPU has the class of that error.
    """
    if failure.failure is Failure.COMMUNICATION or failure.waits:
        return 2
    return 1 if failure.exit_code == -signal.SIGABRT and failure.failure is Failure.KILLED else 0


def ended_without_report(
    rank: int, exit_code: int, end: tuple[Failure, str], tail: list[str], noticed: float
) -> WorkerFailure:
    """The failure of a worker whose process is gone and that had not said that it was done (``process_end``)."""
    failure, message = end
    output = "\n".join(["last output:", *tail]) if tail else "it printed nothing"
    return WorkerFailure(rank, failure, message, f"{message}\n{output}", noticed, exit_code)


OVER_BUDGET = "run.max_gpu_hours"  # takes the place of a signal
LEAST_S, MOST_S = 1.0, 24 * 3600.0  # between two looks at the ledger


@dataclass
class Budget:
    """Of a job that holds ``gpus``."""

    run: RunDirectory
    most: float | None
    gpus: int
    _next: float = field(default=0.0, init=False)  # not before can it be used up; on the monotonic clock

    def hold(self, gpus: int) -> None:
        """The job holds so many from now on."""
        if gpus != self.gpus:
            self.gpus, self._next = gpus, 0.0

    @property
    def is_used_up(self) -> bool:
        """Asked a few times per second."""
        now = time.monotonic()
        if self.most is None or now < self._next:
            return False
        left = self.most - used(self.run)
        self._next = now + min(max(LEAST_S, left * 3600 / max(1, self.gpus)), MOST_S)
        return left <= 0


def over_budget(run: RunDirectory, config: Config) -> str | None:
    """Words for a run that has used up its GPU-hours; None where it may go on."""
    most = config.run.max_gpu_hours
    if most is None or (so_far := used(run)) < most:
        return None
    return f"it has used {so_far:.1f} GPU-hours (run.max_gpu_hours={most:g})"


def used(run: RunDirectory) -> float:
    """GPU-hours, over all jobs of the run."""
    return read_ledger(run, time.time()).total.gpu_hours
