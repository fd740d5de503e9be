"""TCP connections between agents and the rendezvous server: JSON objects, one per line, after a token that admits a
client.

Every user of the node, and on several nodes everybody on the network, can connect to the server's port. Nothing is read
before the token, and a connection without it occupies one of a few slots for a second at most.
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

LONGEST_LINE = 4 << 20  # a start message lists all nodes; a report contains a traceback
READ_BYTES = 1 << 16
SEND_S = 5.0  # a peer that does not receive for this long counts as gone


class BadMessage(ConnectionError):
    """Raised when the peer sends something that is not a message."""


class Channel:
    """A message channel. Any thread may send; only one may read."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(SEND_S)
        self._connection = connection
        self._sending = threading.Lock()
        self._unread = b""

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        """Sends a message. The loss of the peer is detected by ``read``, not here."""
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        with self._sending, contextlib.suppress(OSError):
            self._connection.sendall(line)

    def wait(self, seconds: float) -> bool:
        """Returns whether there is something to read within ``seconds``. Unlike select(), poll() accepts any
        descriptor.
        """
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        return bool(poller.poll(math.ceil(seconds * 1000)))

    def read(self) -> Iterator[Message]:
        """Yields the messages that have arrived; call it when there is something to read.

        Raises:
            ConnectionError: the peer is gone.
            BadMessage: the peer sent something that is not a message.
        """
        try:
            data = self._connection.recv(READ_BYTES)
        except OSError as error:
            raise ConnectionError(str(error)) from error
        if not data:
            raise ConnectionError("closed by the peer")
        *lines, self._unread = (self._unread + data).split(b"\n")
        if len(self._unread) > LONGEST_LINE:
            raise BadMessage(f"line longer than {LONGEST_LINE} bytes")
        for line in lines:
            yield _parse(line)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _parse(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:  # RecursionError: a few kilobytes of "["
        raise BadMessage(f"line is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise BadMessage("line is not a JSON object")
    return message


MAX_PENDING = 32  # concurrent connections that have not sent the token yet
TOKEN_TIMEOUT_S = 1.0  # an agent sends the token as soon as it is connected
PAUSE_S = 0.2  # pause after an accept() error, e.g. when no file descriptor is free


@dataclass(eq=False)
class PendingConnection:
    """A connection that has not sent the whole token yet."""

    connection: socket.socket
    since: float
    received: bytes = field(default=b"", repr=False)


class Admission:
    """Accepts connections on ``listener`` and passes those that send ``token`` to ``admit``.

    When all slots are taken, the oldest pending connection is closed for the newest. A flood of connections therefore
    does
    not block agents: an agent's token usually arrives with its connection, and a rejected agent connects again.
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
        self._pending: dict[PendingConnection, None] = {}  # oldest first
        self._paused_until: float | None = None

    def open(self) -> None:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def tend(self, now: float) -> None:
        """Closes overdue connections; call it a few times per second."""
        for pending in [one for one in self._pending if now - one.since > TOKEN_TIMEOUT_S]:
            self._reject(pending)
        if self._paused_until is not None and now >= self._paused_until:
            self._paused_until = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Stops admitting clients."""
        for pending in list(self._pending):
            self._reject(pending)
        if self._paused_until is None:
            self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):  # the peer is already gone
            return
        except OSError:  # e.g. no file descriptor is free
            self._pause()
            return
        if len(self._pending) >= MAX_PENDING:
            oldest = next(iter(self._pending))
            self._read(oldest)  # its token may have just arrived
            self._reject(oldest)
        connection.setblocking(False)
        pending = PendingConnection(connection, time.monotonic())
        self._pending[pending] = None
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(pending))
        self._read(pending)

    def _pause(self) -> None:
        self._selector.unregister(self._listener)
        self._paused_until = time.monotonic() + PAUSE_S
        for pending in list(self._pending):
            self._reject(pending)

    def _read(self, pending: PendingConnection) -> None:
        if pending not in self._pending:  # rejected since the selector reported it
            return
        try:
            data = pending.connection.recv(len(self._token) - len(pending.received))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        pending.received += data
        if not data:
            self._reject(pending)
        elif len(pending.received) == len(self._token):
            if hmac.compare_digest(pending.received, self._token):
                self._forget(pending)
                self._admit(pending.connection)
            else:
                self._reject(pending)

    def _reject(self, pending: PendingConnection) -> None:
        if pending in self._pending:
            self._forget(pending)
            pending.connection.close()

    def _forget(self, pending: PendingConnection) -> None:
        del self._pending[pending]
        with suppress(KeyError, ValueError):
            self._selector.unregister(pending.connection)
