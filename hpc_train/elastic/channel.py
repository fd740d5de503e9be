"""One TCP connection between an agent and the hub: JSON objects, one per line."""

from __future__ import annotations

import contextlib
import json
import math
import select
import socket
import threading
from collections.abc import Iterator
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
