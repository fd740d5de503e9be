"""HTTP servers on this machine that stand in for the services of trackers."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar


class QuietHandler(http.server.BaseHTTPRequestHandler):
    """Sends JSON and prints no requests."""

    def log_message(self, format: str, *arguments: Any) -> None:
        """Requests are not printed."""

    def _send(self, data: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class LocalServer(http.server.ThreadingHTTPServer):
    """A server at a free port of the loopback interface."""

    def __init__(self, handler: type[QuietHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


Started = TypeVar("Started", bound=LocalServer)


@contextmanager
def serving(server: Started) -> Iterator[Started]:
    """Yields the running server; it ends with the context."""
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
