"""A webhook on this machine that keeps the messages that it gets."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Server(http.server.ThreadingHTTPServer):
    """Keeps the bodies that it gets, and answers with ``code``."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.code = 200
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hooks/secret"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.server.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.server.code)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serve() -> Iterator[Server]:
    found = Server()
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    try:
        yield found
    finally:
        found.shutdown()
        thread.join()
        found.server_close()
