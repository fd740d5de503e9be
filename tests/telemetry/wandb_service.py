"""A stand-in for the W&B service on this machine: as much of it as a run asks for."""

from __future__ import annotations

import gzip
import json
import re
from contextlib import AbstractContextManager
from typing import Any

from tests.report.serving import LocalServer, QuietHandler, serving


class Service(LocalServer):
    """Holds the history of one run as the real service does: a line for each offset, and a later one replaces it."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.history: dict[int, dict[str, Any]] = {}

    def steps(self) -> list[int]:
        return [line["step"] for _, line in sorted(self.history.items())]

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """What GraphQL returns for an operation, by its name."""
        run = {
            **{"id": "run", "name": "abc123", "displayName": "run", "config": "{}", "wandbConfig": '{"t": 1}'},
            **{"project": {"name": "p", "entity": {"name": "e"}}, "historyLineCount": len(self.history)},
            **{"eventsLineCount": 0, "logLineCount": 0, "eventsTail": "[]", "tags": []},
            "summaryMetrics": json.dumps(self.history[max(self.history)] if self.history else {}),
            "historyTail": json.dumps([json.dumps(self.history[max(self.history)])] if self.history else []),
        }
        if operation == "UpsertBucket":
            return {"upsertBucket": {"bucket": run, "inserted": not self.history}}
        if operation == "RunResumeStatus":
            return {"model": {"id": "p", "name": "p", "bucket": run if self.history else None}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "run", "uploadHeaders": [], "files": files}}
        return {}


class _Handler(QuietHandler):
    server: Service

    def do_GET(self) -> None:
        self._send(b"{}")

    def do_PUT(self) -> None:
        self._body()
        self._send(b"{}")

    def do_POST(self) -> None:
        body = json.loads(self._body() or b"{}")
        if "file_stream" in self.path:
            history = body.get("files", {}).get("wandb-history.jsonl", {"offset": 0, "content": []})
            for offset, line in enumerate(history["content"], start=history["offset"]):
                self.server.history[offset] = json.loads(line)
            self._send(b"{}")
            return
        named = re.search(r"(?:query|mutation)\s+(\w+)", body.get("query", ""))
        answer = self.server.answer(named[1] if named else "", body.get("variables", {}))
        self._send(json.dumps({"data": answer}).encode())

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body


def service() -> AbstractContextManager[Service]:
    return serving(Service())
