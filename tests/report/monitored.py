"""The directory of a run that has everything the monitoring shows, and a real Prometheus that reads it."""

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

from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import append_line
from tests.doors.command import REPOSITORY, environment

LINE = {
    "epoch": 1, "world_size": 16, "loss": 2.5, "lr": 1e-3, "grad_norm": 0.7, "loss_scale": 1024.0, "step_s": 0.5,
    "tokens_per_s": 4e5, "samples_per_s": 200.0, "mfu": 0.41, "hfu": 0.45, "gpu_util": 0.97, "data_wait_share": 0.01,
    "host_share": 0.02, "comm_share": 0.12, "bubble_share": 0.05, "peak_memory_bytes": 6e10, "memory_imbalance": 1.1,
    "compute_imbalance": 1.05, "arrival_skew_s": 0.004, "rdma_tx_bytes": 2e9, "rdma_rx_bytes": 2e9,
    "net_tx_bytes": 1e6, "net_rx_bytes": 1e6, "val_loss": 2.4, "val_accuracy": 0.5, "save_s": 0.5, "eval_s": 2.0,
}  # fmt: skip


class MonitoredRun:
    """Appends to the event log and the metrics of a run on two nodes with eight GPUs each."""

    def __init__(self, folder: Path, began: float | None = None) -> None:
        self.run = RunDirectory(folder)
        self.run.create()
        self.now = time.time() - 600 if began is None else began
        self.attempt = 0
        self.step = 0
        self.run.update_record(run_id="0123abcd", total_steps=1000, submissions=[{"time": self.now, "job_id": "7"}])

    def event(self, name: str, writer: str = "agent-n1", **details: Any) -> None:
        self.now += 1.0
        head = {"time": self.now, "event": name, "rank": None, "node": "n1", "attempt": self.attempt, "step": self.step}
        append_line(self.run.events_file(writer, self.attempt), head | details)

    def start(self, launch: str = "7.0.0") -> None:
        """Starts an attempt: the workers resume at the newest step."""
        self.event("started", world_size=16, gpus=16, nodes=["n1", "n2"], launch=launch, job_id="7", began=self.now)
        bandwidth = {"nodes": {"n1": 180.0, "n2": 150.0}, "rails": [22.0, 24.0], "world": 140.0}
        self.event("preflight", "rank-0000", bus_gb_per_s=bandwidth)
        self.event("resumed", "rank-0000")

    def train(self, steps: int, **changed: Any) -> None:
        """Writes a line of metrics for each of ``steps`` times ten steps."""
        for _ in range(steps):
            self.now += 8.0
            self.step += 10
            head = {"time": self.now, "step": self.step, "attempt": self.attempt}
            sums = {"samples": self.step * 100, "tokens": self.step * 1e5}
            append_line(self.run.metrics_file(self.attempt), head | LINE | sums | changed)

    def save(self) -> None:
        self.event("checkpoint_saved", "rank-0000", bytes=1_000_000, seconds=2.0)

    def fail(self, kind: str = "killed") -> None:
        self.event("worker_failed", **{"class": kind})

    def restart(self) -> None:
        """Restarts the workers within the job."""
        self.attempt += 1
        self.start()
        self.event("restarted")

    def requeue(self, launch: str) -> None:
        """Requeues the job, which starts again."""
        self.event("requeued")
        self.event("stopped")
        self.attempt += 1
        self.start(launch)


def eventful(folder: Path) -> MonitoredRun:
    """Returns a run with two failures, a requeue and a failed save, which trains again."""
    made = MonitoredRun(folder)
    made.start()
    made.train(10)
    made.save()
    made.fail()
    made.restart()
    made.train(5)
    made.event("checkpoint_failed", "rank-0000", message="no space left on device")
    made.event("straggler", "rank-0000")
    made.event("slow_node", "rank-0000")
    made.event("step_skipped", "rank-0000", steps=3)
    made.event("rolled_back", "rank-0000", to_step=120)
    made.fail("node_lost")
    made.requeue("7.0.1")
    made.train(5)
    return made


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
