"""What is done when an attempt has ended: a function of how it ended and of the attempts before it."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_train.run.exits import RESPONSES, Action, Exit, Failure

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
class Decision:
    """An action, and why in words."""

    action: Action
    reason: str = ""


def decide(history: History, ended: Ended) -> Decision:
    """``history`` holds the attempts before the one that ``ended``."""
    if ended.failure is None:
        stopped = Action.REQUEUE if ended.stop == ANNOUNCEMENT else Action.STOP
        return Decision(Action.FINISH if ended.exit is Exit.DONE else stopped)
    response, after = RESPONSES[ended.failure], history.after(ended.step)
    action = response.action
    if action is Action.RESTART_IF_FURTHER:
        action = Action.FAIL if after.fruitless and not ended.first else Action.RESTART
    if action not in (Action.RESTART, Action.REPLACE):
        return Decision(action, response.advice)
    if ended.stop is not None:
        return Decision(Action.REQUEUE if ended.stop == ANNOUNCEMENT else Action.FAIL)
    if after.fruitless >= ATTEMPTS_WITHOUT_A_STEP:
        return Decision(Action.GIVE_UP, f"no new step in {after.fruitless} attempts. {response.advice}".strip())
    return Decision(action)
