"""Defines the orders of the coordinator, the reports of agents, and their encoding.

A message to the server is checked completely when it arrives. A wrong field closes the connection of its sender and
affects no other agent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hpc_train.elastic.decision import RestartDecision, WorkerFailure, is_secondary
from hpc_train.elastic.hangs import RankState, find_culprit
from hpc_train.elastic.nodes import Node
from hpc_train.elastic.rendezvous.channel import Message
from hpc_train.layout.layout import Layout
from hpc_train.run.exits import Exit, Failure
from hpc_train.run.processes import this_process
from hpc_train.run.requests import ResizeRequest
from hpc_train.run.rows import check_fields

FIELDS = {  # of the messages that an agent sends after it has introduced itself
    "beat": {"kind"},
    "stop": {"kind", "reason"},
    "quit": {"kind", "message"},
    "stacks": {"kind", "number"},
    "progress": {"kind", "number"},
    "hold": {"kind", "rank", "time", "limit_s"},
    "resize": {"kind", "nodes", "reason", "time", "of_user"},
    "invite": {"kind", "first", "count", "node"},
    "retire": {"kind"},
    "bye": {"kind"},
    "store_lost": {"kind", "attempt"},
    "stacks_saved": {"kind", "attempt"},
    "ended": {"kind", "attempt", "exit", "failure", "step"},
}


def hello(node: Node) -> Message:
    """Returns the first message of an agent. ``process`` lets it replace its own connection, and no other agent's."""
    return {"kind": "hello", "node": node.to_json(), "process": this_process()}


def report_of(message: Message) -> NodeReport:
    """Returns the report of a node.

    Raises:
        TypeError, ValueError, KeyError: a field has a wrong type or value, or is missing.
    """
    value: dict[str, Any] | None = message["failure"]
    failure = None
    if value is not None:
        for state in value["states"]:
            check_fields(RankState.parse(state))
        checked = {"failure": Failure(value["failure"]), "states": tuple(value["states"]), "gpus": tuple(value["gpus"])}
        failure = WorkerFailure(**value | checked)
    report = NodeReport(Exit(typed(message["exit"], int)), failure, message["step"])
    check_fields(report)
    return report


def typed(value: Any, type_: type) -> Any:
    """Returns ``value``, checked here because the coordinator computes with it later, when its sender is unknown.

    Raises:
        TypeError: ``value`` is not a ``type_``.
    """
    if type(value) is not type_:
        raise TypeError(f"{value!r:.100} is not {type_}")
    return value


LONGEST_TEXT = 100_000  # characters of a traceback; the log of the node has all of it


def report_message(attempt: int, report: NodeReport) -> Message:
    """Returns the message that an agent sends when the workers of its node have ended, with texts that fit into it."""
    failure = None
    if report.failure is not None:
        failure = asdict(report.failure)
        for name in ("message", "traceback"):
            failure[name] = _head_and_tail(failure[name])
    return {"kind": "ended", "attempt": attempt, "exit": int(report.exit), "failure": failure, "step": report.step}


def _head_and_tail(text: str) -> str:
    half = LONGEST_TEXT // 2
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:half]}\n… (shortened)\n{text[-half:]}"


@dataclass(frozen=True)
class FailureReport:
    """Holds the failure that ended an attempt; ``noticed`` is on the coordinator's clock."""

    failure: WorkerFailure
    node: str
    noticed: float


def primary_cause(causes: Sequence[FailureReport]) -> FailureReport | None:
    """Returns the primary cause: a lost node first, otherwise the earliest failure that is not secondary, where an
    error of a GPU comes before its consequences on other nodes.

    For a hang, the states of all nodes are combined to find the rank that the others wait for.
    """
    if len(causes) > 1 and all(cause.failure.states for cause in causes):
        hang = find_culprit([cause.failure for cause in causes])
        return next(replace(cause, failure=hang) for cause in causes if cause.failure.states == hang.states)

    def order(cause: FailureReport) -> tuple[bool, bool, bool, float]:
        is_device = cause.failure.failure is Failure.DEVICE
        return not is_loss(cause), is_secondary(cause.failure), not is_device, cause.noticed

    return min(causes, key=order, default=None)


def is_loss(cause: FailureReport) -> bool:
    """Returns whether a node is lost."""
    return cause.failure.failure is Failure.NODE_LOST


@dataclass(frozen=True)
class NodeReport:
    """Reports the end of an attempt on the node of an agent. ``step`` is the furthest step of its workers."""

    exit: Exit
    failure: WorkerFailure | None
    step: int


@dataclass(frozen=True)
class Start:
    """Orders agents to start the next attempt on ``nodes`` (in rank order).

    Attributes:
        before: the nodes of the previous attempt.
        cause: the failure that ended it; None if a resize did.
        reached: its furthest step.
        resize: the request that this attempt fulfills.
        released: the numbers and names of the nodes that are given back; their agents leave.
        guests: the number of nodes that belong to joiner jobs.
    """

    nodes: tuple[Node, ...]
    layout: Layout
    before: tuple[Node, ...] = ()
    cause: FailureReport | None = None
    reached: int = 0
    resize: ResizeRequest | None = None
    released: tuple[tuple[int, str], ...] = ()
    guests: int = 0


@dataclass(frozen=True)
class StopWorkers:
    """Orders agents to stop the workers of the attempt after a checkpoint, since the nodes of the job change."""


@dataclass(frozen=True)
class SaveStacks:
    """Orders agents to save the stacks of the ranks, since some hang and will be killed. ``done`` states that all nodes
    have done so."""

    done: bool


@dataclass(frozen=True)
class End:
    """Orders agents to kill the workers of the attempt, which cannot continue.

    Attributes:
        nodes: the numbers of the nodes; None for all.
    """

    nodes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class GoOn:
    """Orders the workers of the attempt to go on without replicas that are lost (``strategy.local_steps``).

    Attributes:
        lost: the numbers of all replicas that are lost, as counted at the start of the attempt.
        nodes: the names of the nodes that the attempt loses now.
        cause: the failure.
    """

    lost: tuple[int, ...]
    nodes: tuple[str, ...]
    cause: FailureReport


@dataclass(frozen=True)
class Leave:
    """Orders an agent to end the job. ``stop`` is the signal that asked the run to stop. ``outage`` is the error of
    the file system because of which the server cannot continue.
    """

    decision: RestartDecision
    cause: FailureReport | None = None
    stop: str | None = None
    outage: str | None = None


Order = Start | StopWorkers | SaveStacks | End | GoOn | Leave
