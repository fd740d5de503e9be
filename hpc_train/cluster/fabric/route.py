"""Which network interface leads to the node where ranks meet, and which one gloo would take by itself."""

from __future__ import annotations

import socket
from contextlib import suppress

import psutil

ANY_PORT = 9  # nothing is sent: the kernel only looks up the way


def interface_to(host: str) -> str | None:
    """The interface by which ``host`` is reached; None where the kernel has no way."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, ANY_PORT))
        return interface_with(probe.getsockname()[0])
    return None


def automatic_interface() -> str | None:
    """The interface with the address to which this host's name resolves, which gloo binds to."""
    with suppress(OSError):
        return interface_with(socket.gethostbyname(socket.gethostname()))
    return None


def interface_with(address: str) -> str | None:
    """The interface that has ``address``; all of 127.0.0.0/8 is the loopback's."""
    if address.startswith("127."):
        return "lo"
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.family is socket.AF_INET and found.address == address for found in addresses):
            return name
    return None
