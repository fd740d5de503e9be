"""The messages that agents send to the rendezvous server: how they are made, and what the server checks in them.

A message is checked completely when it arrives. A wrong field costs its sender the connection, and affects nobody else.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from hpc_train.elastic.decision import WorkerFailure
from hpc_train.elastic.hangs import RankState
from hpc_train.elastic.nodes import Node
from hpc_train.elastic.rendezvous.channel import Message
from hpc_train.elastic.rendezvous.orders import NodeReport
from hpc_train.run.exits import Exit, Failure
from hpc_train.run.processes import this_process
from hpc_train.run.rows import check_fields

FIELDS = {  # of the messages that an agent sends after it has introduced itself
    "beat": {"kind"},
    "stop": {"kind", "reason"},
    "quit": {"kind", "message"},
    "stacks": {"kind", "number"},
    "progress": {"kind", "number"},
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
    report = NodeReport(Exit(typed(message["exit"], int)), None if value is None else _failure(value), message["step"])
    check_fields(report)
    return report


def _failure(value: dict[str, Any]) -> WorkerFailure:
    for state in value["states"]:
        check_fields(RankState.parse(state))
    failure = Failure(value["failure"])
    states = tuple(value["states"])
    gpus = tuple(value["gpus"])
    return WorkerFailure(**value | {"failure": failure, "states": states, "gpus": gpus})


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
    """Returns the message that an agent sends when the workers of its node have ended."""
    failure = None if report.failure is None else asdict(_shortened(report.failure))
    return {"kind": "ended", "attempt": attempt, "exit": int(report.exit), "failure": failure, "step": report.step}


def _shortened(failure: WorkerFailure) -> WorkerFailure:
    """Returns ``failure`` with texts that fit into a message."""
    return replace(failure, message=_head_and_tail(failure.message), traceback=_head_and_tail(failure.traceback))


def _head_and_tail(text: str) -> str:
    half = LONGEST_TEXT // 2
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:half]}\n… (shortened)\n{text[-half:]}"
