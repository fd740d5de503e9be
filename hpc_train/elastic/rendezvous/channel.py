"""TCP connections between agents and the rendezvous server: JSON objects, one per line, after a token that admits a
client.

Every user of the node, and on several nodes everybody on the network, can connect to the server's port. Nothing is read
before the token, and a connection without it occupies one of a few slots for a second at most.
"""

from __future__ import annotations

import hmac
import json
import math
import select
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hpc_train.run.processes import out_of_descriptors

Message = dict[str, Any]

LONGEST_LINE = 4 << 20  # a start message lists all nodes; a report contains a traceback
MOST_UNSENT = 2 * LONGEST_LINE  # what a peer has not received yet; one that falls further behind counts as gone
READ_BYTES = 1 << 16


class BadMessage(ConnectionError):
    """Raised when the peer sends something that is not a message."""


def encode(message: Message) -> bytes:
    """Returns the line of ``message``."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class Channel:
    """A message channel that never blocks. Any thread may send; only one may read.

    What the peer does not receive at once waits in a buffer of at most ``MOST_UNSENT`` bytes, which ``flush`` empties.
    So a peer that does not receive delays no other peer.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self._connection = connection
        self._sending = threading.Lock()
        self._unsent = bytearray()
        self._unread = bytearray()
        self._failure: str | None = None
        self.received = time.monotonic()  # when the peer last received something, or had received everything

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: Message) -> None:
        """Sends a message. The loss of the peer is detected by ``read``, not here."""
        self.send_line(encode(message))

    def send_line(self, line: bytes) -> None:
        """Sends an encoded message; a broadcast encodes its message once."""
        with self._sending:
            if not self._unsent:
                self.received = time.monotonic()
            self._unsent += line
            self._flush()
            if len(self._unsent) > MOST_UNSENT and self._failure is None:
                self._failure = f"it does not receive: {len(self._unsent)} bytes wait for it"
                with suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)  # makes it readable, and read() raises
            if self._failure is not None:
                self._unsent.clear()

    def flush(self) -> None:
        """Sends as much of the waiting data as the peer accepts now."""
        with self._sending:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]
                self.received = time.monotonic()
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # the peer is gone, which read() reports
            self._unsent.clear()

    def wait(self, seconds: float) -> bool:
        """Returns whether there is something to read within ``seconds``, and sends what has waited meanwhile. Unlike
        select(), poll() accepts any descriptor.
        """
        poller = select.poll()
        poller.register(self._connection, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        events = [event for _, event in poller.poll(math.ceil(seconds * 1000))]
        if any(event & select.POLLOUT for event in events):
            self.flush()
        return any(event & ~select.POLLOUT for event in events)

    def read(self) -> Iterator[Message]:
        """Yields the messages that have arrived; call it when there is something to read.

        Raises:
            ConnectionError: the peer is gone, or does not receive.
            BadMessage: the peer sent something that is not a message.
        """
        if self._failure is not None:
            raise ConnectionError(self._failure)
        try:
            data = self._connection.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise ConnectionError(str(error)) from error
        if not data:
            raise ConnectionError("closed by the peer")
        for line in self._complete_lines(data):
            yield _parse(line)

    def _complete_lines(self, data: bytes) -> list[bytes]:
        """Returns the lines that ``data`` completes; it searches only the new bytes, so slow peers cost little."""
        searched = len(self._unread)
        self._unread += data
        end = self._unread.rfind(b"\n", searched)
        if len(self._unread) - end - 1 > LONGEST_LINE:
            raise BadMessage(f"line longer than {LONGEST_LINE} bytes")
        if end < 0:
            return []
        lines = bytes(self._unread[:end]).split(b"\n")
        del self._unread[: end + 1]
        return lines

    def close(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _parse(line: bytes) -> Message:
    try:
        message = json.loads(line)
        if b"\\u" in line:
            json.dumps(message, ensure_ascii=False).encode()  # half a surrogate pair could not be printed later
    except (ValueError, RecursionError) as error:  # RecursionError: a few kilobytes of "["
        raise BadMessage(f"line is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise BadMessage("line is not a JSON object")
    return message


MAX_PENDING = 32  # concurrent connections that have not sent the token yet
TOKEN_TIMEOUT_S = 1.0  # an agent sends the token as soon as it is connected
ACCEPTS = 16  # connections accepted in a row before those that exist are served
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
    does not block agents: an agent's token usually arrives with its connection, and a rejected agent connects again.
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
        self._has_reported = False

    def listen(self) -> None:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def tend(self, now: float) -> None:
        """Closes overdue connections; call it a few times per second."""
        for pending in [connection for connection in self._pending if now - connection.since > TOKEN_TIMEOUT_S]:
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
        for _ in range(ACCEPTS):
            try:
                self._take(self._listener.accept()[0])
            except (BlockingIOError, InterruptedError, ConnectionError):  # none left, or the peer is already gone
                return
            except OSError as error:  # e.g. no file descriptor is free
                self._pause(error)
                return

    def _take(self, connection: socket.socket) -> None:
        if len(self._pending) >= MAX_PENDING:
            oldest = next(iter(self._pending))
            self._read(oldest)  # its token may have just arrived
            self._reject(oldest)
        connection.setblocking(False)
        pending = PendingConnection(connection, time.monotonic())
        self._pending[pending] = None
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(pending))
        self._read(pending)

    def _pause(self, error: OSError) -> None:
        if not self._has_reported:
            self._has_reported = True
            why = out_of_descriptors(error) or error
            print(f"the rendezvous server cannot accept connections: {why}", file=sys.stderr, flush=True)
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
