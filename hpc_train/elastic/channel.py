"""One TCP connection between an agent and the hub: JSON objects, one per line.

The door of the hub: what connects must first send the token, and nothing else it sends is read before that.

Every user of the node can connect to the hub's port, and with several nodes everybody on the network. Whoever does not
know the token costs the hub one of a few places for a second at most, and never more memory than the token takes.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]

LONGEST_LINE = 4 << 20  # a start message names all nodes; a report holds a traceback
READ_BYTES = 1 << 16
SEND_S = 5.0  # a peer that takes nothing for so long is gone


class BadMessage(ConnectionError):
    """The other side lives, and sends something that is not a message."""


class Channel:
    """Sends from any thread; ``read`` from one."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(SEND_S)
        self._connection = connection
        self._sending = threading.Lock()
        self._unread = b""

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        """A peer that is gone is noticed by ``read``, not here."""
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        with self._sending, contextlib.suppress(OSError):
            self._connection.sendall(line)

    def wait(self, seconds: float) -> bool:
        """Whether there is something to read within ``seconds``. Unlike select(), poll() takes any descriptor."""
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        return bool(poller.poll(math.ceil(seconds * 1000)))

    def read(self) -> Iterator[Message]:
        """The messages that have come; called when there is something to read.

        Raises:
            ConnectionError: the peer is gone.
            BadMessage: it sends something that is not a message.
        """
        try:
            data = self._connection.recv(READ_BYTES)
        except OSError as error:
            raise ConnectionError(str(error)) from error
        if not data:
            raise ConnectionError("closed by the other side")
        *lines, self._unread = (self._unread + data).split(b"\n")
        if len(self._unread) > LONGEST_LINE:
            raise BadMessage(f"a line of more than {LONGEST_LINE} bytes")
        for line in lines:
            yield _parse(line)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _parse(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:  # a few kilobytes of "[" are nested too deeply for the parser
        raise BadMessage(f"a line that is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise BadMessage("a line that is not a JSON object")
    return message


MAX_PENDING = 32  # connections at a time that have not sent the token yet
TOKEN_TIMEOUT_S = 1.0  # for the token of each; an agent sends it as soon as it is connected
PAUSE_S = 0.2  # without accepting, after an error: a process without free descriptors would do nothing but fail


@dataclass(eq=False)
class PendingConnection:
    """A connection that has not sent the whole token."""

    connection: socket.socket
    since: float
    said: bytes = field(default=b"", repr=False)


class Admission:
    """Accepts connections on ``listener`` and hands those that send ``token`` to ``admit``.

    The oldest stranger makes room for the newest. A flood of connections therefore does not keep agents waiting: an
    agent's token is mostly there when its connection is accepted, and an agent that is turned away connects again.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        selector: selectors.BaseSelector,
        admit: Callable[[socket.socket], None],
    ) -> None:
        self._listener = listener
        self._token = token.encode()
        self._selector = selector
        self._admit = admit
        self._strangers: dict[PendingConnection, None] = {}  # the oldest first
        self._paused_until: float | None = None

    def open(self) -> None:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def tend(self, now: float) -> None:
        """Called a few times per second: ends what is overdue."""
        for stranger in [one for one in self._strangers if now - one.since > TOKEN_TIMEOUT_S]:
            self._turn_away(stranger)
        if self._paused_until is not None and now >= self._paused_until:
            self._paused_until = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Nobody is taken in any more."""
        for stranger in list(self._strangers):
            self._turn_away(stranger)
        if self._paused_until is None:
            self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):  # the other side has gone meanwhile
            return
        except OSError:  # no descriptor is free, say
            self._pause()
            return
        if len(self._strangers) >= MAX_PENDING:
            oldest = next(iter(self._strangers))
            self._read(oldest)  # its token may have come by now
            self._turn_away(oldest)
        connection.setblocking(False)
        stranger = PendingConnection(connection, time.monotonic())
        self._strangers[stranger] = None
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(stranger))
        self._read(stranger)

    def _pause(self) -> None:
        self._selector.unregister(self._listener)
        self._paused_until = time.monotonic() + PAUSE_S
        for stranger in list(self._strangers):
            self._turn_away(stranger)

    def _read(self, stranger: PendingConnection) -> None:
        if stranger not in self._strangers:  # turned away since the selector named it
            return
        try:
            said = stranger.connection.recv(len(self._token) - len(stranger.said))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            said = b""
        stranger.said += said
        if not said:
            self._turn_away(stranger)
        elif len(stranger.said) == len(self._token):
            if hmac.compare_digest(stranger.said, self._token):
                self._forget(stranger)
                self._admit(stranger.connection)
            else:
                self._turn_away(stranger)

    def _turn_away(self, stranger: PendingConnection) -> None:
        if stranger in self._strangers:
            self._forget(stranger)
            stranger.connection.close()

    def _forget(self, stranger: PendingConnection) -> None:
        del self._strangers[stranger]
        with suppress(KeyError, ValueError):
            self._selector.unregister(stranger.connection)
