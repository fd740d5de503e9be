"""Decides which of the failures that nodes report has caused the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpc_train.elastic.decision import WorkerFailure, is_secondary
from hpc_train.elastic.hangs import find_culprit
from hpc_train.run.exits import Failure


@dataclass(frozen=True)
class FailureReport:
    """Holds the failure that ended an attempt; ``noticed`` is on the coordinator's clock."""

    failure: WorkerFailure
    node: str
    noticed: float


def primary_cause(causes: Sequence[FailureReport]) -> FailureReport | None:
    """Returns the primary cause: a lost node first, otherwise the earliest failure that is not secondary, and among
    these an error of a GPU before its consequences on other nodes.

    For a hang the states of all nodes are combined to find the rank that the others wait for.
    """
    if len(causes) > 1 and all(cause.failure.states for cause in causes):
        hang = find_culprit([cause.failure for cause in causes])
        return next(replace(cause, failure=hang) for cause in causes if cause.failure.states == hang.states)
    return min(causes, key=_order, default=None)


def _order(cause: FailureReport) -> tuple[bool, bool, bool, float]:
    return (
        not is_loss(cause),
        is_secondary(cause.failure),
        cause.failure.failure is not Failure.DEVICE,
        cause.noticed,
    )


def is_loss(cause: FailureReport) -> bool:
    """Returns whether a node is lost."""
    return cause.failure.failure is Failure.NODE_LOST
