"""Decides what follows an attempt: the restart decision, the primary failure among several, and the GPU-hour budget."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from hpc_train.config.schema import Config
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import RESPONSES, Action, Exit, Failure, advice_for
from hpc_train.run.files import in_time
from hpc_train.run.ledger import read_ledger

ANNOUNCEMENT = "SIGUSR2"  # Slurm announces the time limit and preemptions with it; other signals come from a user
ATTEMPTS_WITHOUT_A_STEP = 3
OF_CODE = (Failure.USER_ERROR, Failure.REFUSED, Failure.EXITED, Failure.COMMUNICATION)
GOOD_STEPS = 10  # the first two steps allocate all memory, an evaluation may need slightly more


@dataclass(frozen=True)
class Ended:
    """Describes the end of an attempt on all of its nodes.

    Attributes:
        failure: the class of its cause; None if nothing failed.
        step: the furthest step it reached.
        stop: the signal that asked the run to stop; None if there was none.
        first: whether the run has not failed like this before and the node may be to blame.
        gpu_memory: whether it ended because the memory of a GPU was used up.
        message: the message of the cause.
        saved: whether the run has a checkpoint; None if that is unknown.
    """

    exit: Exit
    failure: Failure | None
    step: int
    stop: str | None = None
    first: bool = False
    gpu_memory: bool = False
    message: str = ""
    saved: bool | None = None


@dataclass(frozen=True)
class History:
    """Summarizes the attempts of this job so far.

    Attributes:
        furthest: the furthest step, also of earlier jobs of the run.
        without_progress: number of consecutive attempts without progress.
        attempts: number of attempts, at least one per earlier start of a requeued job.
        gpu_memory: whether an attempt ended because the memory of a GPU was used up.
        restarts_left: what is left of ``elastic.max_restarts``; None without this limit.
    """

    furthest: int
    without_progress: int = 0
    attempts: int = 0
    gpu_memory: bool = False
    restarts_left: int | None = None

    def after(self, step: int, gpu_memory: bool = False) -> History:
        """Returns the history after one more attempt, which reached ``step``."""
        without_progress = 0 if step > self.furthest else self.without_progress + 1
        gpu_memory = gpu_memory or self.gpu_memory
        left = None if self.restarts_left is None else max(0, self.restarts_left - 1)
        return History(max(step, self.furthest), without_progress, self.attempts + 1, gpu_memory, left)


@dataclass(frozen=True)
class RestartDecision:
    """Holds an action and its reason."""

    action: Action
    reason: str = ""


def decide(history: History, ended: Ended) -> RestartDecision:
    """Returns the decision after the attempt ``ended``; ``history`` holds the attempts before it."""
    # an attempt that a user stops while it starts, and that then fails, has lost nothing
    while_starting = ended.stop not in (None, ANNOUNCEMENT) and ended.step <= history.furthest
    if ended.failure is None or (while_starting and ended.failure in OF_CODE):
        stopped = Action.REQUEUE if ended.stop == ANNOUNCEMENT else Action.STOP
        return RestartDecision(Action.FINISH if ended.exit is Exit.DONE else stopped)
    after = history.after(ended.step)
    advice = advice_for(ended.failure, ended.message, ended.saved)
    action = RESPONSES[ended.failure].action
    if action is Action.RESTART_IF_FURTHER:
        action = Action.FAIL if after.without_progress and not ended.first else Action.RESTART
    if action is Action.RESTART_ONCE:
        action = Action.RESTART if _may_come_free(history, ended) else Action.FAIL
    exhausted = Action.GIVE_UP
    if action is Action.RESTART_OR_REQUEUE:
        action = Action.RESTART
        exhausted = Action.REQUEUE
    left = history.restarts_left
    if left is not None and action is Action.FAIL:
        action = Action.RESTART
    if action not in (Action.RESTART, Action.REPLACE):
        return RestartDecision(action, advice)
    if ended.stop is not None:
        return RestartDecision(Action.REQUEUE if ended.stop == ANNOUNCEMENT else Action.FAIL)
    if left == 0:
        return RestartDecision(exhausted, f"elastic.max_restarts allows no further restart. {advice}".strip())
    if left is None and after.without_progress >= ATTEMPTS_WITHOUT_A_STEP:
        return RestartDecision(exhausted, f"no new step in {after.without_progress} attempts. {advice}".strip())
    return RestartDecision(action)


def _may_come_free(history: History, ended: Ended) -> bool:
    """Returns whether the memory of a GPU was enough before, so that other processes may have held it this time."""
    was_enough = history.attempts > 0 or history.furthest > 0 or ended.step >= GOOD_STEPS
    return ended.gpu_memory and was_enough and not history.gpu_memory


@dataclass(frozen=True)
class WorkerFailure:
    """Describes the failure of one worker.

    Attributes:
        message: one line.
        traceback: the worker's traceback, or the last lines of its output if it died without one.
        noticed: seconds since the epoch, on the worker's clock if it reported the failure.
        exit_code: negative for a signal; None if the worker reported before it ended.
        waits: in a hang, no rank of this node is behind, so all wait for another node. In a collective failure, another
            rank is the cause.
        states: in a hang, the state of each rank of this node (``hangs.RankState``) as plain data.
        gpus: after an error of a GPU, what the GPUs of the node and the kernel log report, a line each.
    """

    rank: int
    failure: Failure
    message: str
    traceback: str
    noticed: float
    exit_code: int | None = None
    waits: bool = False
    states: tuple[dict[str, Any], ...] = ()
    gpus: tuple[str, ...] = ()


def root_cause(failures: Iterable[WorkerFailure]) -> WorkerFailure:
    """Returns the earliest failure that is not a consequence of another rank's failure."""
    return min(failures, key=lambda failure: (_secondary_level(failure), failure.noticed))


def is_secondary(failure: WorkerFailure) -> bool:
    """Returns whether the failure is a consequence of another rank's failure."""
    return _secondary_level(failure) > 0


def _secondary_level(failure: WorkerFailure) -> int:
    """Returns 0 for a primary failure, 1 for an abort as communication libraries do after losing a peer, 2 for a
    communication error. An abort that names an error of the rank's own GPU has the class of that error.
    """
    if failure.failure is Failure.COMMUNICATION or failure.waits:
        return 2
    if failure.exit_code == -signal.SIGABRT and failure.failure is Failure.KILLED:
        return 1
    return 0


def ended_without_report(
    rank: int, exit_code: int, end: tuple[Failure, str], tail: list[str], noticed: float
) -> WorkerFailure:
    """Returns the failure of a worker whose process ended without a report."""
    failure, message = end
    output = "\n".join(["last output:", *tail]) if tail else "it printed nothing"
    if failure is Failure.ROLE:
        output = "the log of the role has its output"
    return WorkerFailure(rank, failure, message, f"{message}\n{output}", noticed, exit_code)


OVER_BUDGET = "run.max_gpu_hours"  # replaces the name of a signal
RETRY_S = 60.0  # after a failed reading
MIN_INTERVAL_S, MAX_INTERVAL_S = 1.0, 24 * 3600.0  # between two readings of the ledger


@dataclass
class Budget:
    """The GPU-hour budget (``run.max_gpu_hours``) of a job that holds ``gpus`` GPUs.

    A live run that has used up the budget is asked to stop, saves, and is not started again. ``now`` is the clock of
    the job.
    """

    run: RunDirectory
    most: float | None
    gpus: int
    now: Callable[[], float] = time.time
    _next: float = field(default=0.0, init=False)  # earliest time at which it can be used up, on the monotonic clock

    def hold(self, gpus: int) -> None:
        """Sets the number of GPUs that the job holds from now on."""
        if gpus != self.gpus:
            self.gpus = gpus
            self._next = 0.0

    @property
    def is_used_up(self) -> bool:
        """Returns whether the budget is used up. It is polled a few times per second."""
        now = time.monotonic()
        if self.most is None or now < self._next:
            return False
        try:
            left = self.most - in_time(lambda: used(self.run, self.now()))
        except OSError:  # the file system is away: look again later
            self._next = now + RETRY_S
            return False
        self._next = now + min(max(MIN_INTERVAL_S, left * 3600 / max(1, self.gpus)), MAX_INTERVAL_S)
        return left <= 0


def over_budget(run: RunDirectory, config: Config, now: float) -> str | None:
    """Describes a run that has used up its GPU hours at the time ``now``; None otherwise."""
    most = config.run.max_gpu_hours
    if most is None or (so_far := used(run, now)) < most:
        return None
    return f"the run has used {so_far:.1f} GPU-hours (run.max_gpu_hours={most:g})"


def used(run: RunDirectory, now: float) -> float:
    """Returns the GPU hours used by all jobs of the run until ``now``."""
    return read_ledger(run, now).total.gpu_hours
