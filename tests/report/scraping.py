"""Starts a real Prometheus with the configuration of deploy/monitoring, and asks it."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.doors.command import REPOSITORY, environment

DEPLOY = REPOSITORY / "deploy" / "monitoring"
NEEDED = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="needs Prometheus: MONITORING_INSTALL=1 make monitoring-up",
)
VARIABLES = {"$user": ".+", "$run": ".+"}  # of the dashboards


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus that scrapes twice a second."""

    url: str
    config: Path
    targets: Path

    def ask(self, path: str, **parameters: Any) -> Any:
        query = urllib.parse.urlencode(parameters, doseq=True)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Returns the labels and the value of each series."""
        found: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return found

    def value(self, expression: str) -> float | None:
        """Returns the value of the only series; None without one."""
        found = self.query(expression)
        assert len(found) < 2, found
        return float(found[0]["value"][1]) if found else None

    def firing(self) -> set[str]:
        return {alert["labels"]["alertname"] for alert in self.ask("alerts")["alerts"] if alert["state"] == "firing"}

    def series(self, name: str) -> list[dict[str, str]]:
        """Returns the labels of all series of a metric, also of those that have ended."""
        found: list[dict[str, str]] = self.ask("series", **{"match[]": name})
        return found


@contextmanager
def scraping(folder: Path, home: Path) -> Iterator[Prometheus]:
    """Starts and stops a Prometheus by ``monitoring.py``, as ``make monitoring-up`` does.

    Args:
        home: where the token is, as HOME of the runs.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    state = folder / "monitoring"

    def call(command: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, str(DEPLOY / "monitoring.py"), command]
        options = [f"--state={state}", f"--port={port}", "--scrape=500ms"]
        own = environment(HOME=str(home))
        return subprocess.run([*words, *options], env=own, capture_output=True, text=True, timeout=120, check=False)

    up = call("up")
    try:
        assert up.returncode == 0, up.stdout + up.stderr
        assert f"telemetry.prometheus.targets_dir={state}/targets" in up.stdout
        yield Prometheus(f"http://127.0.0.1:{port}", state / "prometheus.yml", state / "targets")
    finally:
        down = call("down")
    assert down.returncode == 0 and not state.exists(), down.stdout + down.stderr


def queries(dashboard: Path) -> Mapping[str, str]:
    """Returns the queries of a dashboard by the title of their panel and their letter."""
    found = {}
    for panel in json.loads(dashboard.read_text())["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"]
            for name, value in VARIABLES.items():
                text = text.replace(name, value)
            assert not re.search(r"\$\w", text), text
            found[f"{dashboard.stem}: {panel['title']} {target['refId']}"] = text
    return found


def until(found: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline, "gave up"
        time.sleep(0.05)
