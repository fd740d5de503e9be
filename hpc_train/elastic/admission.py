"""The door of the hub: what connects must first send the token, and nothing else it sends is read before that.

Every user of the node can connect to the hub's port, and with several nodes everybody on the network. Whoever does not
know the token costs the hub one of a few places for a second at most, and never more memory than the token takes.
"""

from __future__ import annotations

import hmac
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

STRANGERS = 32  # connections at a time that have not sent the token yet
STRANGER_S = 1.0  # for the token of each; an agent sends it as soon as it is connected
PAUSE_S = 0.2  # without accepting, after an error: a process without free descriptors would do nothing but fail


@dataclass(eq=False)
class Stranger:
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
        self._strangers: dict[Stranger, None] = {}  # the oldest first
        self._paused_until: float | None = None

    def open(self) -> None:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def tend(self, now: float) -> None:
        """Called a few times per second: ends what is overdue."""
        for stranger in [one for one in self._strangers if now - one.since > STRANGER_S]:
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
        if len(self._strangers) >= STRANGERS:
            oldest = next(iter(self._strangers))
            self._read(oldest)  # its token may have come by now
            self._turn_away(oldest)
        connection.setblocking(False)
        stranger = Stranger(connection, time.monotonic())
        self._strangers[stranger] = None
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(stranger))
        self._read(stranger)

    def _pause(self) -> None:
        self._selector.unregister(self._listener)
        self._paused_until = time.monotonic() + PAUSE_S
        for stranger in list(self._strangers):
            self._turn_away(stranger)

    def _read(self, stranger: Stranger) -> None:
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

    def _turn_away(self, stranger: Stranger) -> None:
        if stranger in self._strangers:
            self._forget(stranger)
            stranger.connection.close()

    def _forget(self, stranger: Stranger) -> None:
        del self._strangers[stranger]
        with suppress(KeyError, ValueError):
            self._selector.unregister(stranger.connection)
