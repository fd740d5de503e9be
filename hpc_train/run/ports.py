"""Whether a TCP port of this host is free."""

from __future__ import annotations

import socket


def can_listen(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
    return True
