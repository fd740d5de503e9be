"""The rendezvous server: a thread in the agent of the batch host, to which the agents of all nodes are connected.

It alone decides (``coordinator.py``) and broadcasts orders: the next attempt, its end, or the end of the job. A node is
lost when its connection closes or it is silent for ``elastic.heartbeat_timeout_s``, not counting time in which this
process stalled (a suspended job or machine) or in which Slurm reports the job as suspended.
"""

from __future__ import annotations

import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from hpc_train.elastic.channel import Admission, BadMessage, Channel, Message
from hpc_train.elastic.coordinator import Coordinator, End, Leave, NodeReport, Order, Start
from hpc_train.elastic.decision import RestartDecision, WorkerFailure
from hpc_train.elastic.hangs import RankState
from hpc_train.elastic.nodes import Node
from hpc_train.run.exits import Action, Exit, Failure
from hpc_train.run.files import BackgroundCall

Result = TypeVar("Result")

BEAT_S = 1.0
BEATS = 3  # minimum number of heartbeats in elastic.heartbeat_timeout_s
ASK_S = 5.0  # timeout of the query to Slurm whether the job is suspended
LEAVE_S = 10.0  # wait at most this long for the agents' byes
TICK_S = 0.1
FILES_S = 300.0  # how long the file system of the run directory may keep the next attempt or the end of the job waiting


@dataclass
class Member:
    """An admitted connection; ``node`` is None until its agent has introduced itself."""

    channel: Channel
    heard: float
    node: Node | None = None


class SuspendedQuery:
    """Asks Slurm once whether the job is suspended, in its own thread because Slurm may be slow."""

    def __init__(self, ask: Callable[[], bool], now: float) -> None:
        self._ask = ask
        self._asked = now
        self._answer: bool | None = None
        threading.Thread(target=self._run, name="is-suspended", daemon=True).start()

    def _run(self) -> None:
        self._answer = self._ask()

    def answer(self, now: float) -> bool | None:
        """Returns the answer; None while it is unknown. No answer in time counts as no."""
        return False if self._answer is None and now - self._asked > ASK_S else self._answer


class RendezvousServer:
    """Serves until the job is over.

    Args:
        listener: the socket on which agents connect.
        token: the token that an agent must send first.
        begin: prepares an attempt; returns the start message.
        leave: records how the job ended; returns the exit code of all agents.
        is_suspended: asks Slurm whether the job is suspended; None without Slurm.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        listener: socket.socket,
        token: str,
        heartbeat_timeout_s: float,
        begin: Callable[[Start], Message],
        leave: Callable[[Leave], int],
        is_suspended: Callable[[], bool] | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._silent_node_s = heartbeat_timeout_s
        self._begin = begin
        self._leave = leave
        self._is_suspended = is_suspended
        self._query: SuspendedQuery | None = None
        self._members: dict[int, Member] = {}  # by file descriptor
        self._selector = selectors.DefaultSelector()
        self._admission = Admission(listener, token, self._selector, self._admit)
        self._attempt: int | None = None
        self._over = False
        self._thread = threading.Thread(target=self._serve, name="rendezvous-server", daemon=True)

    def start(self) -> None:
        self._admission.open()
        self._thread.start()

    def join(self) -> None:
        self._thread.join(LEAVE_S)

    def _serve(self) -> None:
        try:
            self._coordinate()
        except OSError as error:  # usually the file system of the run directory
            self._give_up(self._coordinator.cannot_continue(str(error)))
        except Exception as error:
            traceback.print_exc()
            self._give_up(Leave(RestartDecision(Action.FAIL, f"the rendezvous server failed: {error!r}")))
        finally:
            self._wait_for_byes()

    def _give_up(self, leave: Leave) -> None:
        """Ends the job when the server cannot continue, so that no agent waits for it."""
        try:
            self._execute(leave)
        except Exception:
            traceback.print_exc()
            self._broadcast({"kind": "leave", "action": Action.FAIL, "code": int(Exit.FAILED)})

    def _coordinate(self) -> None:
        next_beat, looked = 0.0, time.monotonic()
        while not self._over:
            for key, _ in self._selector.select(TICK_S):
                key.data()
            now = time.monotonic()
            self._admission.tend(now)
            if has_stalled(now - looked, self._silent_node_s):
                self._reset_silence(now)
                self._coordinator.postpone(now - looked)
            looked = now
            self._drop_silent(now)
            if now >= next_beat:
                next_beat = now + beat_s(self._silent_node_s)
                self._broadcast({"kind": "beat"})
            while not self._over and (order := self._coordinator.next(now)) is not None:
                self._execute(order)

    def _admit(self, connection: socket.socket) -> None:
        with suppress(OSError):  # the peer is already gone
            channel = Channel(connection)
            member = Member(channel, time.monotonic())
            self._members[channel.fileno()] = member
            self._selector.register(channel, selectors.EVENT_READ, lambda: self._read(member))

    def _read(self, member: Member) -> None:
        try:
            for message in member.channel.read():
                member.heard = time.monotonic()
                self._handle(member, message)
        except Exception as error:  # a bad message affects only its sender
            why = str(error)
            if isinstance(error, BadMessage) or not isinstance(error, ConnectionError):
                why = f"its agent sent an invalid message: {error!r}"
                name = "an agent" if member.node is None else f"node {member.node.name}"
                print(f"the rendezvous server drops {name}: {why}", file=sys.stderr, flush=True)
                member.channel.send({"kind": "dropped", "why": why})
            self._drop(member, why)

    def _handle(self, member: Member, message: Message) -> None:
        kind = message["kind"]
        if member.node is None:
            self._register(member, message)
        elif kind == "stop":
            self._coordinator.stop = self._coordinator.stop or _typed(message["reason"], str)
        elif kind == "quit":
            self._coordinator.quit(_typed(message["message"], str))
        elif kind == "store_lost" and message["attempt"] == self._attempt:
            self._coordinator.store_lost(member.heard)
        elif kind == "ended" and message["attempt"] == self._attempt:
            self._coordinator.reported(member.node.number, _report(message), member.heard)

    def _register(self, member: Member, message: Message) -> None:
        node = Node.from_json(message["node"])
        for other in [one for one in self._members.values() if one.node is not None]:
            if other.node is not None and other.node.number == node.number:
                self._drop(other, "its agent reconnected")
        member.node = node
        self._coordinator.joined(node)

    def _drop_silent(self, now: float) -> None:
        silent = [member for member in self._members.values() if now - member.heard > self._silent_node_s]
        if not silent:
            self._query = None
            return
        if self._is_suspended is not None and any(member.node is not None for member in silent):
            self._query = self._query or SuspendedQuery(self._is_suspended, now)
            suspended = self._query.answer(now)
            if suspended is None:
                return
            if suspended:
                self._reset_silence(now)
                return
        for member in silent:
            self._drop(member, f"silent for {self._silent_node_s:g} s (elastic.heartbeat_timeout_s)")

    def _reset_silence(self, now: float) -> None:
        """Restarts the silence timers of all nodes."""
        for member in self._members.values():
            member.heard = now

    def _drop(self, member: Member, why: str) -> None:
        if self._members.pop(member.channel.fileno(), None) is None:
            return
        with suppress(KeyError, ValueError):
            self._selector.unregister(member.channel)
        member.channel.close()
        if member.node is not None:
            self._coordinator.left(member.node.number, why, time.monotonic())

    def _execute(self, order: Order) -> None:
        if isinstance(order, Start):
            message = self._while_beating(lambda: self._begin(order))
            self._attempt = message["attempt"]
            self._broadcast({"kind": "start", "spec": message})
        elif isinstance(order, End):
            self._broadcast({"kind": "end", "attempt": self._attempt, "hang": order.hang})
        else:
            code = self._while_beating(lambda: self._leave(order))
            self._broadcast({"kind": "leave", "action": order.decision.action, "code": code})
            self._over = True

    def _while_beating(self, action: Callable[[], Result]) -> Result:
        """Returns the result of ``action``, which waits for the file system, and sends heartbeats meanwhile.

        Raises:
            TimeoutError: it has not returned after ``FILES_S``. It is an OSError.
        """
        call, until = BackgroundCall(action), time.monotonic() + FILES_S
        while True:
            try:
                return call.result(beat_s(self._silent_node_s))
            except TimeoutError:
                if time.monotonic() > until:
                    raise
            self._broadcast({"kind": "beat"})

    def _broadcast(self, message: Message) -> None:
        for member in list(self._members.values()):
            if member.node is not None:
                member.channel.send(message)

    def _wait_for_byes(self) -> None:
        """Releases all agents together, because Slurm may end the others when the first one exits. Each agent sends
        ``bye`` and waits until its connection is closed here.
        """
        self._admission.close()
        until = time.monotonic() + LEAVE_S
        waited = {fd for fd, member in self._members.items() if member.node is not None}
        while waited and time.monotonic() < until:
            for key, _ in self._selector.select(TICK_S):
                member = self._members.get(key.fd)
                if member is not None and _has_said_bye(member.channel):
                    waited.discard(key.fd)
                    self._selector.unregister(key.fileobj)
        for member in self._members.values():
            member.channel.close()
        self._selector.close()


def beat_s(heartbeat_timeout_s: float) -> float:
    """Returns the interval of the heartbeats between server and agents."""
    return min(BEAT_S, heartbeat_timeout_s / BEATS)


def has_stalled(seconds: float, heartbeat_timeout_s: float) -> bool:
    """Returns whether a loop whose last iteration began ``seconds`` ago stalled, so that missing messages mean
    nothing.
    """
    return seconds > 2 * beat_s(heartbeat_timeout_s)


def _has_said_bye(channel: Channel) -> bool:
    try:
        return any(message.get("kind") == "bye" for message in channel.read())
    except ConnectionError:  # gone, or it sends invalid messages
        return True


def _report(message: Message) -> NodeReport:
    failure: dict[str, Any] | None = message["failure"]
    parsed = None if failure is None else _failure(failure)
    return NodeReport(Exit(message["exit"]), parsed, _typed(message["step"], int))


def _failure(value: dict[str, Any]) -> WorkerFailure:
    for name in ("message", "traceback"):
        _typed(value[name], str)
    _typed(value["rank"], int)
    _typed(value["noticed"], float)
    _typed(value["exit_code"], int | None)
    for state in value["states"]:
        RankState.parse(state)
    gpus = tuple(_typed(line, str) for line in value["gpus"])
    states = tuple(value["states"])
    return WorkerFailure(**value | {"failure": Failure(value["failure"]), "states": states, "gpus": gpus})


def _typed(value: Any, type_: Any) -> Any:
    """Returns ``value``, checked here because the coordinator computes with it later, when its sender is unknown.

    Raises:
        TypeError: ``value`` is not a ``type_``.
    """
    if not isinstance(value, type_):
        raise TypeError(f"{value!r:.100} is not {type_}")
    return value


def report_message(attempt: int, report: NodeReport) -> Message:
    """Returns the message that an agent sends when the workers of its node have ended."""
    failure = None if report.failure is None else asdict(report.failure)
    return {"kind": "ended", "attempt": attempt, "exit": int(report.exit), "failure": failure, "step": report.step}
