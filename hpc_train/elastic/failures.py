"""Which of several failures came first: when one rank fails, the others fail too, of connections that it closed."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hpc_train.run.exits import Failure


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


def is_echo(failure: WorkerFailure) -> bool:
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
