"""The files of deploy/monitoring: every panel shows something, the rules fire, and the shippers know the lines."""

from __future__ import annotations

import json
import re
import subprocess
import time
import tomllib
from pathlib import Path

import pytest

from hpc_train.config.schema import PrometheusConfig, TelemetryConfig
from hpc_train.elastic.workers import WorkerLog
from hpc_train.machine.allocation import Allocation
from hpc_train.report.monitoring.exporter import monitored
from hpc_train.report.monitoring.metrics import METRICS
from hpc_train.run.event_log import EventLog
from hpc_train.run.file_writer import FileWriter
from tests.report.monitored import DEPLOY, NEEDED, eventful, queries, scraping, until

DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
LINE = re.compile(r"\^\(\?P?<time>.*\$(?=['\"`])")  # the expression of the shippers for a line of a log


def promtool(*arguments: str) -> str:
    done = subprocess.run(["promtool", *arguments], cwd=DEPLOY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@NEEDED
def test_the_rules_fire() -> None:
    promtool("test", "rules", "rules_test.yml")


@NEEDED
@pytest.mark.long_form(20)  # the rules above; metrics and labels of the panels below
def test_every_panel_shows_a_run_that_is_one_series_over_a_requeue_and_the_alert_fires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # of the token
    made = eventful(tmp_path / "runs" / "small")
    with scraping(tmp_path, home=tmp_path) as prometheus:
        promtool("check", "config", str(prometheus.config))
        settings = PrometheusConfig(port="auto", host="0.0.0.0", targets_dir=str(prometheus.targets), interval_s=0.2)
        events = EventLog.open(made.run, "agent-n1", 2)
        job = Allocation(2, 0, "n1", "7", "7.0.1", "n1")
        with monitored(made.run, TelemetryConfig(prometheus=settings), job, events):
            asked = {name: text for path in DASHBOARDS for name, text in queries(path).items()}
            for name, text in asked.items():
                try:
                    until(lambda text=text: prometheus.query(text), 30)  # type: ignore[misc]
                except AssertionError:
                    pytest.fail(f"{name} shows nothing: {text}")
            assert "HpcTrainRestarted" not in prometheus.firing()
            made.now = time.time()
            made.requeue("7.0.2")
        again = Allocation(2, 0, "n2", "7", "7.0.2", "n2")  # on another node and port
        with monitored(made.run, TelemetryConfig(prometheus=settings), again, events):
            until(lambda: prometheus.value("hpc_train_requeues_total") == 2)
            until(lambda: "HpcTrainRestarted" in prometheus.firing())
            until(lambda: len(prometheus.series("hpc_train_run_info")) == 2)
            assert [len(prometheus.series(f"hpc_train_{name}")) for name in ("step", "loss")] == [1, 1]
        events.close()


def test_dashboards_and_rules_use_metrics_and_labels_that_exist() -> None:
    texts = [path.read_text() for path in (DEPLOY / "rules.yml", DEPLOY / "rules_test.yml")]
    texts += [text for path in DASHBOARDS for text in queries(path).values()]
    known = {metric.shown for metric in METRICS}
    used = {name for text in texts for name in re.findall(r"\bhpc_train_\w+", text)}
    assert used == known, "every metric is on a dashboard"
    boards = [json.loads(path.read_text()) for path in DASHBOARDS]
    assert len({board["uid"] for board in boards}) == len(boards) == 3
    for board in boards:
        numbers = [panel["id"] for panel in board["panels"]]
        assert len(set(numbers)) == len(numbers)


def test_the_shippers_know_the_lines_of_a_log(tmp_path: Path) -> None:
    writer = FileWriter("the output of the workers")
    log = WorkerLog(tmp_path / "n1-000.log", writer)
    log.write(3, b"step 1/20  loss [5.57]\n")
    log.close()
    writer.close()
    (line,) = (tmp_path / "n1-000.log").read_text().splitlines()
    for name in ("config.alloy", "vector.toml"):  # Logstash leaves it to Elasticsearch, see test_elastic.py
        (expression,) = LINE.findall((DEPLOY / "logs" / name).read_text())
        found = re.match(expression.replace("(?<", "(?P<"), line)
        assert found is not None and found["rank"] == "3" and found["text"] == "step 1/20  loss [5.57]"
    tomllib.loads((DEPLOY / "logs" / "vector.toml").read_text())
