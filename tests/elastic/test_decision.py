"""What is done about each way in which an attempt can end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpc_train.elastic.decision import ATTEMPTS_WITHOUT_A_STEP, GOOD_STEPS, Ended, History, decide
from hpc_train.run.exits import EXITS, RESPONSES, Action, Exit, Failure

RESTARTING = {
    Action.RESTART,
    Action.RESTART_IF_FURTHER,
    Action.RESTART_ONCE,
    Action.RESTART_OR_REQUEUE,
    Action.REPLACE,
}
RETRIED = (Failure.KILLED, Failure.EXITED, Failure.COMMUNICATION, Failure.HANG)


def failed(failure: Failure, step: int = 9, stop: str | None = None) -> Ended:
    return Ended(Exit.FAILED, failure, step, stop)


def test_every_class_of_failure_has_a_response() -> None:
    assert set(RESPONSES) == set(Failure)


@pytest.mark.parametrize(
    ("ended", "action"),
    [
        (Ended(Exit.DONE, None, 9), Action.FINISH),
        (Ended(Exit.DONE, None, 9, "SIGUSR2"), Action.FINISH),
        (Ended(Exit.STOPPED, None, 9, "SIGTERM"), Action.STOP),
        (Ended(Exit.STOPPED, None, 9, "SIGUSR2"), Action.REQUEUE),
        (failed(Failure.KILLED, stop="SIGUSR2"), Action.REQUEUE),  # what was saved before serves
        (failed(Failure.KILLED, stop="SIGTERM"), Action.FAIL),
        # stopped by a user while it started: nothing is lost, whatever the code says about it
        *((failed(failure, 5, "SIGTERM"), Action.STOP) for failure in (Failure.USER_ERROR, Failure.EXITED)),
        (failed(Failure.KILLED, 5, "SIGTERM"), Action.FAIL),  # it did not stop in time
        (failed(Failure.USER_ERROR, 5, "SIGUSR2"), Action.FAIL),
        (failed(Failure.DISK_FULL, 5, "SIGTERM"), Action.FAIL),
        (failed(Failure.OUT_OF_MEMORY, stop="SIGUSR2"), Action.FAIL),
        *((failed(failure), Action.RESTART) for failure in RETRIED),
        (failed(Failure.FILE_SYSTEM), Action.RESTART),
        (failed(Failure.FILE_SYSTEM, stop="SIGUSR2"), Action.REQUEUE),
        (failed(Failure.NODE_LOST), Action.REPLACE),
        (failed(Failure.DEVICE), Action.REPLACE),
        (failed(Failure.DEVICE, step=5), Action.REPLACE),
        (failed(Failure.KERNEL, step=9), Action.RESTART),
        (replace(failed(Failure.KERNEL, step=5), first=True), Action.RESTART),
        (failed(Failure.KERNEL, step=5), Action.FAIL),
        (failed(Failure.OUT_OF_MEMORY), Action.FAIL),
        (failed(Failure.DISK_FULL), Action.FAIL),
        (failed(Failure.REFUSED), Action.REFUSE),
        (failed(Failure.NAN), Action.FAIL),
        (failed(Failure.USER_ERROR, step=9), Action.RESTART),
        (failed(Failure.USER_ERROR, step=5), Action.FAIL),  # the attempt before had come as far
    ],
)
def test_the_table(ended: Ended, action: Action) -> None:
    assert decide(History(furthest=5), ended).action is action


@pytest.mark.parametrize(
    ("failure", "last"),
    [
        *((failure, Action.GIVE_UP) for failure in (*RETRIED, Failure.NODE_LOST, Failure.DEVICE)),
        (Failure.FILE_SYSTEM, Action.REQUEUE),
    ],
)
def test_three_attempts_without_a_new_step_are_enough(failure: Failure, last: Action) -> None:
    history, actions = History(furthest=5), []
    for step in (6, 6, 0, 6):
        ended = failed(failure, step)
        actions.append(decide(history, ended).action)
        history = history.after(step)
    assert actions[-1] is last
    assert last not in actions[:-1]
    assert history.without_progress == ATTEMPTS_WITHOUT_A_STEP
    assert history.after(7).without_progress == 0


def test_every_action_that_ends_a_run_has_an_exit_code() -> None:
    assert set(EXITS) == set(Action) - RESTARTING


OOM, KILLED = Failure.OUT_OF_MEMORY, Failure.KILLED


@pytest.mark.parametrize(
    ("restored", "failures", "expected"),
    [
        (0, [(OOM, 0)], Action.FAIL),  # the very first start
        (0, [(OOM, 2)], Action.FAIL),  # before the first steps have allocated everything
        (0, [(OOM, GOOD_STEPS)], Action.RESTART),
        (40, [(OOM, 40)], Action.RESTART),  # a requeue, before its first step
        (0, [(KILLED, 0), (OOM, 0)], Action.RESTART),  # the processes of the killed attempt may live
        (0, [(KILLED, 30), (OOM, 30)], Action.RESTART),
        (0, [(OOM, 30), (OOM, 30)], Action.FAIL),
        (0, [(OOM, 30), (OOM, 60)], Action.FAIL),
        (40, [(OOM, 40), (KILLED, 60), (OOM, 80)], Action.FAIL),
    ],
)
def test_gpu_memory_that_was_enough_before_is_tried_once_more(
    restored: int, failures: list[tuple[Failure, int]], expected: Action
) -> None:
    history, actions = History(furthest=restored), []
    for failure, step in failures:
        ended = replace(failed(failure, step), gpu_memory=failure is OOM)
        actions.append(decide(history, ended).action)
        history = history.after(step, ended.gpu_memory)
    assert actions == [*[Action.RESTART] * (len(failures) - 1), expected]


def test_host_memory_fails_at_once() -> None:
    assert decide(History(furthest=40, attempts=1), failed(OOM, 60)).action is Action.FAIL
