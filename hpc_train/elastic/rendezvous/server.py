"""The rendezvous server: a thread in the agent of the batch host, to which the agents of all nodes are connected.

It alone decides (``coordinator.py``) and broadcasts orders: the next attempt, its end, or the end of the job. A node is
lost when its connection closes, or when it sends or receives nothing for ``elastic.heartbeat_timeout_s``, not counting
time in which this process stalled (a suspended job or machine) or in which Slurm reports the job as suspended.

A bad or slow member affects only itself: messages are checked as they are read, and sending to a member never blocks.
"""

from __future__ import annotations

import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from hpc_train.elastic.decision import RestartDecision
from hpc_train.elastic.nodes import Node
from hpc_train.elastic.rendezvous.channel import MAX_PENDING, Admission, BadMessage, Channel, Message, encode
from hpc_train.elastic.rendezvous.coordinator import Coordinator
from hpc_train.elastic.rendezvous.messages import (
    FIELDS,
    End,
    GoOn,
    Leave,
    Order,
    SaveStacks,
    Start,
    StopWorkers,
    is_loss,
    report_of,
    typed,
)
from hpc_train.run.exits import Action, Exit
from hpc_train.run.files import BackgroundCall
from hpc_train.run.requests import HoldRequest, ResizeRequest
from hpc_train.run.rows import check_fields

Result = TypeVar("Result")

BEAT_S = 1.0
BEATS_PER_S = 1000  # at most, from all agents together: each costs some 20 us of a core
BEATS = 3  # minimum number of heartbeats in elastic.heartbeat_timeout_s
ASK_S = 5.0  # timeout of the query to Slurm whether the job is suspended
LEAVE_S = 10.0  # wait at most this long for the agents' byes
TICK_S = 0.1
PREPARING_TICK_S = 0.01  # while the next attempt is prepared
LOOK_S = 0.25  # interval of the search for silent nodes
MESSAGES_PER_S = 1000  # an agent sends about one; after a stall of this process, one for each second of it
FILES_S = 300.0  # how long the file system of the run directory may keep the next attempt or the end of the job waiting


@dataclass
class Member:
    """Holds an admitted connection; ``node`` is None until its agent has introduced itself.

    ``process`` identifies the agent, so that it replaces its own connection and no other's. ``is_writing``: whether
    the selector reports when it can receive more.
    """

    channel: Channel
    heard: float
    node: Node | None = None
    process: Any = None
    is_writing: bool = False
    messages: int = 0  # since the last heartbeat

    @property
    def name(self) -> str:
        if self.node is None:
            return "an agent"
        return f"node {self.node.name}"

    @property
    def alive(self) -> float:
        """Returns when it was last known to have both sent and received."""
        if self.channel.has_unsent:
            return min(self.heard, self.channel.received)
        return self.heard


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
        if self._answer is None and now - self._asked > ASK_S:
            return False
        return self._answer


class Preparation:
    """Prepares an attempt in its own thread, because with thousands of nodes, or on a slow file system, it takes longer
    than agents may wait for a heartbeat.
    """

    def __init__(self, begin: Callable[[Start], Message], start: Start) -> None:
        self._begin = begin
        self._start = start
        self._message: Message | None = None
        self._error: Exception | None = None
        self._until = time.monotonic() + FILES_S
        threading.Thread(target=self._run, name="prepare-attempt", daemon=True).start()

    def _run(self) -> None:
        try:
            self._message = self._begin(self._start)
        except Exception as error:
            self._error = error

    def message(self) -> Message | None:
        """Returns the start message; None while it is prepared.

        Raises:
            TimeoutError: it is not prepared after ``FILES_S``. It is an OSError.
            Exception: the exception of ``begin``.
        """
        if self._error is not None:
            raise self._error
        if self._message is None and time.monotonic() > self._until:
            raise TimeoutError(f"the file system did not respond within {FILES_S:g} s")
        return self._message


class RendezvousServer:
    """Serves until the job is over.

    Args:
        listener: the socket on which agents connect.
        token: the token that an agent must send first.
        begin: prepares an attempt; returns the start message.
        leave: records how the job ended; returns the exit code of all agents.
        is_suspended: asks Slurm whether the job is suspended; None without Slurm.

    Attributes:
        code: the exit code of all agents, once the job is over.
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
        self._nodes: dict[int, Member] = {}  # those that have introduced themselves, by number of the node
        self._selector = selectors.DefaultSelector()
        self._admission = Admission(listener, token, self._selector, self._admit)
        self._network: socket.socket | None = None  # a further listener that waits to be opened
        self._token = token
        self._further: list[Admission] = []
        self._attempt: int | None = None
        self._preparation: Preparation | None = None
        self._over = False
        self.code: int | None = None
        self._thread = threading.Thread(target=self._serve, name="rendezvous-server", daemon=True)

    def start(self) -> None:
        self._admission.listen()
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
        next_beat = 0.0
        next_look = 0.0
        looked = time.monotonic()
        while not self._over:
            for key, _ in self._selector.select(TICK_S if self._preparation is None else PREPARING_TICK_S):
                key.data()
            now = time.monotonic()
            if self._network is not None:
                self._further.append(Admission(self._network, self._token, self._selector, self._admit))
                self._network = None
                self._further[-1].listen()
            for admission in (self._admission, *self._further):
                admission.tend(now)
            if has_stalled(now - looked, self._silent_node_s, self._coordinator.expected):
                self._reset_silence(now)
                self._coordinator.postpone(now - looked)
            looked = now
            if now >= next_look:
                next_look = now + LOOK_S
                self._drop_silent(now)
            if now >= next_beat:
                next_beat = now + beat_s(self._silent_node_s, self._coordinator.expected)
                self._broadcast({"kind": "beat"})
                for member in self._members.values():
                    member.messages = 0
            self._start_prepared()
            while not self._over and self._preparation is None and (order := self._coordinator.next(now)) is not None:
                self._execute(order)

    def _admit(self, connection: socket.socket) -> None:
        with suppress(OSError):  # the peer is already gone
            channel = Channel(connection)
            member = Member(channel, time.monotonic())
            self._members[channel.fileno()] = member
            self._selector.register(channel, selectors.EVENT_READ, lambda: self._serve_member(member))
            if len(self._members) > len(self._nodes) + self._coordinator.expected + MAX_PENDING:
                oldest = next(candidate for candidate in self._members.values() if candidate.node is None)
                self._drop(oldest, "too many agents have not introduced themselves")

    def _serve_member(self, member: Member) -> None:
        if self._members.get(member.channel.fileno()) is not member:  # dropped since the selector reported it
            return
        member.channel.flush()
        self._watch_writing(member)
        self._read(member)

    def _watch_writing(self, member: Member) -> None:
        """Lets the selector report when ``member`` can receive more, if something waits for it."""
        if member.is_writing != member.channel.has_unsent:
            member.is_writing = not member.is_writing
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if member.is_writing else 0)
            self._selector.modify(member.channel, events, lambda: self._serve_member(member))

    def _read(self, member: Member) -> None:
        try:
            for message in member.channel.read():
                member.heard = time.monotonic()
                member.messages += 1
                if member.messages > MESSAGES_PER_S:
                    raise BadMessage(f"more than {MESSAGES_PER_S} messages in a second")
                self._handle(member, message)
        except Exception as error:  # a bad message affects only its sender
            why = str(error)
            if isinstance(error, BadMessage) or not isinstance(error, ConnectionError):
                why = f"its agent sent an invalid message: {error!r:.1000}"
                print(f"the rendezvous server drops {member.name}: {why}", file=sys.stderr, flush=True)
                member.channel.send({"kind": "dropped", "why": why})
            self._drop(member, why)

    def _handle(self, member: Member, message: Message) -> None:
        if member.node is None:
            self._register(member, message)
            return
        kind = message["kind"]
        if message.keys() != FIELDS[kind]:
            raise BadMessage(f"the fields of {kind!r} are {sorted(message)!r:.200}")
        if kind == "stop":
            self._coordinator.stop = self._coordinator.stop or typed(message["reason"], str)
        elif kind == "quit":
            self._coordinator.quit(typed(message["message"], str))
        elif kind in ("resize", "invite", "retire", "bye"):
            self._handle_change(member, member.node, message)
        elif kind in ("stacks", "progress"):  # node 0 has found a request, or newer files of a script
            self._broadcast({"kind": kind, "number": typed(message["number"], int)})
        elif kind == "hold":
            check_fields(HoldRequest(**{name: value for name, value in message.items() if name != "kind"}))
            self._broadcast(message)
        elif kind in ("store_lost", "stacks_saved", "ended") and typed(message["attempt"], int) == self._attempt:
            if kind == "stacks_saved":
                self._coordinator.stacks_saved(member.node.number)
            elif kind == "ended":
                self._coordinator.reported(member.node.number, report_of(message), member.heard)
            elif member.node.number == 0:  # its agent runs the store
                self._coordinator.store_lost(member.heard)

    def _handle_change(self, member: Member, node: Node, message: Message) -> None:
        """Handles the messages about a change of the nodes; only the agent of node 0 may ask for one."""
        kind = message["kind"]
        if kind == "resize" and node.number == 0:
            request = ResizeRequest(**{name: value for name, value in message.items() if name != "kind"})
            check_fields(request)
            self._coordinator.request_resize(request)
        elif kind == "invite" and node.number == 0:
            host = Node.from_json(message["node"])
            self._coordinator.invite(typed(message["first"], int), typed(message["count"], int), host)
        elif kind == "retire" and self._coordinator.is_guest(node.number):
            if self._coordinator.retire(node.number):
                self._dismiss([node.number])
        elif kind == "bye" and self._coordinator.was_released(node.number):
            self._drop(member, "it has left")
        else:
            raise BadMessage(f"{kind!r} is not for node {node.number} to send")

    def _register(self, member: Member, message: Message) -> None:
        if message["kind"] != "hello":
            raise BadMessage("the first message is not hello")
        node = Node.from_json(message["node"])
        process = message.get("process")
        if not self._coordinator.admits(node.number):
            raise BadMessage(f"there is no node {node.number} among {self._coordinator.expected}")
        other = self._nodes.get(node.number)
        if other is not None:
            if process is None or process != other.process:
                raise BadMessage(f"another agent has joined as node {node.number}: does a second one run there?")
            self._drop(other, "its agent reconnected")
        member.node = node
        member.process = process
        self._nodes[node.number] = member
        if (why := self._coordinator.declines(node)) is not None:
            print(why, file=sys.stderr, flush=True)
            self._dismiss([node.number])
            return
        self._coordinator.joined(node)

    def _drop_silent(self, now: float) -> None:
        silent = [member for member in self._members.values() if now - member.alive > self._silent_node_s]
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
            self._drop(member, f"silent for {self._silent_node_s:g} s (elastic.heartbeat_timeout_s)", frozen=True)

    def _reset_silence(self, now: float) -> None:
        """Restarts the silence timers of all nodes."""
        for member in self._members.values():
            member.heard = member.channel.received = now

    def _drop(self, member: Member, why: str, frozen: bool = False) -> None:
        if self._members.pop(member.channel.fileno(), None) is None:
            return
        with suppress(KeyError, ValueError):
            self._selector.unregister(member.channel)
        member.channel.close()
        if member.node is not None:
            del self._nodes[member.node.number]
            self._coordinator.left(member.node.number, why, time.monotonic(), frozen)

    def _execute(self, order: Order) -> None:
        if isinstance(order, Start):
            self._attempt = None  # a late report of the previous attempt is not one of the next
            self._dismiss([number for number, _ in order.released])
            self._preparation = Preparation(self._begin, order)
        elif isinstance(order, StopWorkers):
            self._broadcast({"kind": "stop_workers", "attempt": self._attempt})
        elif isinstance(order, End):
            self._broadcast({"kind": "end", "attempt": self._attempt}, order.nodes)
        elif isinstance(order, GoOn):
            failure = order.cause.failure
            message = failure.message
            if not is_loss(order.cause):
                message = f"rank {failure.rank} on {order.cause.node}: {message}"
            event = {
                "node": order.cause.node, "rank": failure.rank, "class": failure.failure, "nodes": [*order.nodes],
                "message": message,
            }  # fmt: skip
            self._broadcast({"kind": "go_on", "attempt": self._attempt, "lost": [*order.lost], "event": event})
        elif isinstance(order, SaveStacks):
            self._broadcast({"kind": "save_stacks", "attempt": self._attempt, "done": order.done})
        else:
            code = self._while_beating(lambda: self._leave(order))
            self._broadcast({"kind": "leave", "action": order.decision.action, "code": code})
            self.code = code
            self._over = True

    def _dismiss(self, numbers: Collection[int]) -> None:
        """Lets the agents of nodes leave that are given back."""
        for number in numbers:
            if (member := self._nodes.get(number)) is not None:
                member.channel.send({"kind": "leave", "action": Action.FINISH, "code": int(Exit.DONE)})
                self._watch_writing(member)

    def listen(self, listener: socket.socket) -> None:
        """Admits the agents of joiner jobs on another address; called in another thread, and before they know it."""
        self._network = listener

    def _start_prepared(self) -> None:
        """Starts the attempt if it is prepared. Orders that end it wait until then."""
        message = None if self._preparation is None else self._preparation.message()
        if message is not None:
            self._preparation = None
            self._attempt = message["attempt"]
            self._broadcast({"kind": "start", "spec": message})

    def _while_beating(self, action: Callable[[], Result]) -> Result:
        """Returns the result of ``action``, which waits for the file system, and sends heartbeats meanwhile.

        Raises:
            TimeoutError: it has not returned after ``FILES_S``. It is an OSError.
        """
        call = BackgroundCall(action)
        until = time.monotonic() + FILES_S
        while True:
            try:
                return call.result(beat_s(self._silent_node_s, self._coordinator.expected))
            except TimeoutError:
                if time.monotonic() > until:
                    raise
            self._broadcast({"kind": "beat"})

    def _broadcast(self, message: Message, nodes: Collection[int] | None = None) -> None:
        """Sends ``message`` to the agents of ``nodes``; None stands for all."""
        line = encode(message)
        for number, member in self._nodes.items():
            if nodes is None or number in nodes:
                member.channel.send_line(line)
                self._watch_writing(member)

    def _wait_for_byes(self) -> None:
        """Releases all agents together, because Slurm may end the others when the first one exits. Each agent sends
        ``bye`` and waits until its connection is closed here.
        """
        for admission in (self._admission, *self._further):
            admission.close()
        until = time.monotonic() + LEAVE_S
        waited = {member.channel.fileno() for member in self._nodes.values()}
        while waited and time.monotonic() < until:
            for key, _ in self._selector.select(TICK_S):
                member = self._members.get(key.fd)
                if member is not None:
                    member.channel.flush()
                    self._watch_writing(member)
                    said_bye = True
                    with suppress(ConnectionError):  # gone, or it sends invalid messages
                        said_bye = any(message.get("kind") == "bye" for message in member.channel.read())
                    if said_bye:
                        waited.discard(key.fd)
                        self._selector.unregister(key.fileobj)
        for member in self._members.values():
            member.channel.close()
        self._selector.close()


def beat_s(heartbeat_timeout_s: float, nodes: int = 1) -> float:
    """Returns the interval of the heartbeats between the server and each agent: one second for up to ``BEATS_PER_S``
    nodes.
    """
    return min(max(BEAT_S, nodes / BEATS_PER_S), heartbeat_timeout_s / BEATS)


def has_stalled(seconds: float, heartbeat_timeout_s: float, nodes: int = 1) -> bool:
    """Returns whether a loop whose last iteration began ``seconds`` ago stalled, so that missing messages mean
    nothing.
    """
    return seconds > 2 * beat_s(heartbeat_timeout_s, nodes)
