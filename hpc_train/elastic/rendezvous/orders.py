"""Defines what the coordinator orders the agents to do, and what they report to it."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_train.elastic.decision import RestartDecision, WorkerFailure
from hpc_train.elastic.nodes import Node
from hpc_train.elastic.rendezvous.causes import FailureReport
from hpc_train.layout.layout import Layout
from hpc_train.run.exits import Exit


@dataclass(frozen=True)
class NodeReport:
    """Reports the end of an attempt on the node of an agent. ``step`` is the furthest step of its workers."""

    exit: Exit
    failure: WorkerFailure | None
    step: int


@dataclass(frozen=True)
class Start:
    """Order to start the next attempt on ``nodes`` (in rank order). ``cause`` ended the previous attempt, on
    ``before``.
    """

    nodes: tuple[Node, ...]
    layout: Layout
    before: tuple[Node, ...] = ()
    cause: FailureReport | None = None


@dataclass(frozen=True)
class SaveStacks:
    """Order to save the stacks of the ranks, since some hang and will be killed. ``done``: all nodes have done so."""

    done: bool


@dataclass(frozen=True)
class End:
    """Order to kill the workers of the attempt, which cannot continue."""


@dataclass(frozen=True)
class Leave:
    """Orders an agent to end the job. ``stop`` is the signal that asked the run to stop. ``outage`` is the error of
    the file system because of which the server cannot continue.
    """

    decision: RestartDecision
    cause: FailureReport | None = None
    stop: str | None = None
    outage: str | None = None


Order = Start | SaveStacks | End | Leave
