"""What a run shows to the monitoring of a site: names, values over restarts, the endpoint, and sinks that hang."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hpc_train.config.schema import PrometheusConfig, TelemetryConfig
from hpc_train.config.values import check_prometheus
from hpc_train.errors import UserError
from hpc_train.machine.allocation import Allocation
from hpc_train.machine.health.health_check import NodeHealth
from hpc_train.machine.health.health_check import metrics as node_metrics
from hpc_train.report.monitoring import exits, exporter, metrics
from hpc_train.report.monitoring.exits import Endpoint, MetricsFile, text_of
from hpc_train.report.monitoring.exporter import monitored
from hpc_train.report.monitoring.metrics import Identity, RunReader, Snapshot
from hpc_train.run.event_log import EventLog
from tests.doors.command import REPOSITORY
from tests.report.monitored import MonitoredRun, eventful

LABELS = {"run": "small", "run_id": "0123abcd", "user": "jane"}
WHO = Identity(LABELS, "7", "gpu", "n1")
HERE = Allocation(1, 0, "n1", None, "launch", "127.0.0.1")


def shown(made: MonitoredRun, now: float | None = None) -> dict[str, float]:
    """Returns the value of each series, by name and the values of the metric's own labels."""
    text = text_of(RunReader(made.run, WHO).read(made.now + 1 if now is None else now))[0].decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        " ".join([sample.name, *(value for label, value in sample.labels.items() if label not in LABELS)]): sample.value
        for sample in samples
    }


def test_a_run_shows_every_metric_of_the_table_with_its_labels_and_no_other(tmp_path: Path) -> None:
    text = text_of(RunReader(eventful(tmp_path).run, WHO).read())[0].decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    found = {name: {frozenset(sample.labels) for sample in family.samples} for name, family in families.items()}
    assert found == {metrics.PREFIX + row.name: {frozenset([*LABELS, *row.labels])} for row in metrics.METRICS}
    for row in metrics.METRICS:
        own = {sample.labels[row.labels[0]] for sample in families[metrics.PREFIX + row.name].samples if row.choices}
        assert own == set(row.choices), row.name
    node = {line.split()[2] for line in node_metrics(NodeHealth("n1", ())).splitlines() if line.startswith("# TYPE")}
    assert not node & {row.shown for row in metrics.METRICS}, "the textfile collector refuses two texts for a name"


def test_the_docs_have_the_table() -> None:
    assert metrics.table() in (REPOSITORY / "docs" / "howto" / "monitoring.md").read_text()


def test_counters_continue_over_restarts_and_requeues(tmp_path: Path) -> None:
    found = shown(made := eventful(tmp_path))
    expected = {
        "restarts_total": 1, "requeues_total": 1, "failures_total killed": 1, "failures_total node_lost": 1,
        "failures_total hang": 0, "checkpoint_saves_total": 1, "checkpoint_failures_total": 1,
        "checkpoint_failures_in_a_row": 1, "last_checkpoint_step": 100, "skipped_steps_total": 3, "rollbacks_total": 1,
        "step": 200, "attempt": 2, "nodes": 2, "allocated_gpus": 16, "planned_steps": 1000, "stalled": 0,
        "network_transmit_bytes_per_second rdma": 4e9, "preflight_bandwidth_bytes_per_second node": 150e9,
    }  # fmt: skip
    assert {name: found["hpc_train_" + name] for name in expected} == expected
    total = sum(value for name, value in found.items() if name.startswith("hpc_train_time_seconds"))
    assert total > 150 and 0 < found["hpc_train_goodput_ratio"] < 1
    assert found["hpc_train_gpu_seconds"] == pytest.approx(16 * (total - found["hpc_train_time_seconds queue"]))
    made.save()
    made.event("checkpoint_saved", "rank-0000")  # without the details of a whole event
    assert shown(made)["hpc_train_checkpoint_failures_in_a_row"] == 0


def test_a_reader_that_stays_sees_what_a_new_one_sees(tmp_path: Path) -> None:
    made = MonitoredRun(tmp_path)
    reader = RunReader(made.run, WHO)
    assert reader.read(made.now).samples["run_state"][("starting",)] == 1
    made.start()
    made.train(3)
    reader.read(made.now)
    made.fail()
    made.restart()
    made.train(3)
    made.event("finished")  # the ledger is read again at the end
    assert reader.read(made.now) == RunReader(made.run, WHO).read(made.now)


def test_the_state_of_a_run(tmp_path: Path) -> None:
    made = MonitoredRun(tmp_path)

    def state() -> str:
        series = shown(made)
        (found,) = [name.split()[1] for name, value in series.items() if "run_state" in name and value == 1]
        return found

    calls: list[tuple[str, Callable[[], object]]] = [
        ("starting", made.start),
        ("training", lambda: made.train(1)),
        ("evaluating", lambda: made.event("evaluation_started", "rank-0000")),
        ("training", lambda: made.train(1)),
        ("restarting", made.fail),
        ("starting", made.restart),
        ("requeued", lambda: (made.event("requeued"), made.event("stopped"))),
        ("starting", lambda: made.start("7.0.1")),
        ("failed", lambda: made.event("stopped_retrying")),
        ("finished", lambda: made.event("finished")),
    ]
    for expected, call in calls:
        call()
        assert state() == expected


def test_a_run_without_progress_is_stalled_until_it_ends(tmp_path: Path) -> None:
    made = MonitoredRun(tmp_path)
    made.start()
    made.train(5)
    last = made.now
    assert shown(made, last + 299)["hpc_train_stalled"] == 0
    assert shown(made, last + 301)["hpc_train_stalled"] == 1
    made.now += 100  # a slow line, so that the usual time between two lines is longer
    made.train(1)
    assert shown(made, made.now + 301)["hpc_train_stalled"] == 0
    made.event("evaluation_started")
    assert shown(made, made.now + 1200)["hpc_train_stalled"] == 0
    made.event("failed")
    assert shown(made, made.now + 1e6)["hpc_train_stalled"] == 0


def test_the_file_is_in_the_run_or_in_a_directory_from_which_it_is_removed(tmp_path: Path) -> None:
    made = eventful(tmp_path / "run")
    snapshot = RunReader(made.run, WHO).read()
    (tmp_path / "textfile").mkdir()
    paths = {
        "auto": made.run.metrics / "current.prom",
        str(tmp_path / "own.prom"): tmp_path / "own.prom",
        str(tmp_path / "textfile"): tmp_path / "textfile" / "hpc_train_0123abcd.prom",
    }
    for where, path in paths.items():
        file = MetricsFile(where, made.run, "0123abcd")
        file.publish(snapshot)
        assert 'hpc_train_loss{run="small",run_id="0123abcd",user="jane"} 2.5\n' in path.read_text()
        assert list(path.parent.glob(".*.prom*")) == [], "the temporary file is gone"
        file.close()
        assert path.exists() == (path.parent.name != "textfile")
    assert [line["step"] for line in made.run.read_metrics()][-1] == 200, "readers of metrics/ skip the file"


def get(url: str, token: str | None = None, accept: str = "") -> tuple[int, str, str]:
    headers = {"Accept": accept} | ({} if token is None else {"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, "", error.read().decode()


def test_the_endpoint_needs_the_token_and_is_found_by_its_target(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
    settings = PrometheusConfig(port="auto", token_file=str(token), targets_dir=str(tmp_path / "targets"))
    endpoint = Endpoint(settings, HERE, "0123abcd", dict)
    (target,) = json.loads((tmp_path / "targets" / "hpc_train_0123abcd.json").read_text())
    assert target == {"targets": [endpoint.address], "labels": {"instance": "0123abcd"}}
    url = f"http://{endpoint.address}/metrics"
    assert [get(url)[0], get(url, "wrong")[0], get(url, "secret")[0]] == [401, 401, 503]
    endpoint.publish(RunReader(eventful(tmp_path / "run").run, WHO).read())
    status, kind, text = get(url, "secret", "application/openmetrics-text; version=1.0.0")
    assert status == 200 and kind.startswith("application/openmetrics-text") and text.endswith("# EOF\n")
    assert get(url.replace("metrics", "config.yaml"), "secret")[0] == 404
    endpoint.close()
    assert list((tmp_path / "targets").iterdir()) == []
    token.chmod(0o640)
    with pytest.raises(UserError, match="other users may read the token"):
        Endpoint(settings, HERE, "0123abcd", dict)
    assert list((tmp_path / "targets").iterdir()) == []


def test_a_job_makes_a_private_token_and_a_taken_port_is_a_clear_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    in_job = Allocation(1, 0, "no-such-name", "7", "7.0.0", "127.0.0.1")
    endpoint = Endpoint(PrometheusConfig(port=0, host="0.0.0.0"), in_job, "0123abcd", dict)
    assert endpoint.token_file is not None and endpoint.token_file.stat().st_mode & 0o777 == 0o600
    port = int(endpoint.address.rpartition(":")[2])
    with pytest.raises(UserError, match=f"cannot be served: 127.0.0.1:{port}: Address already in use"):
        Endpoint(PrometheusConfig(port=port), HERE, "0123abcd", dict)
    endpoint.close()


def test_a_run_shows_its_end_and_records_its_address_while_it_runs(tmp_path: Path) -> None:
    made = eventful(tmp_path / "run")
    events = EventLog.open(made.run, "agent-n1", 2)
    config = TelemetryConfig(prometheus=PrometheusConfig(port="auto", file="auto", interval_s=600))
    with monitored(made.run, config, HERE, events):
        until(lambda: made.run.record().get("prometheus"))
        url = made.run.record()["prometheus"]["url"]
        until(lambda: get(url)[0] == 200)
        made.now = time.time()
        made.event("finished")
    events.close()
    text = (made.run.metrics / "current.prom").read_text()
    assert re.search('run_state{.*state="finished".*} 1.0', text)
    assert made.run.record()["prometheus"] is None
    assert [event for event in made.run.read_events() if event["event"] == "warning"] == []


class Hanging:
    """Represents a way out that blocks in every call until ``freed``."""

    def __init__(self) -> None:
        self.freed = threading.Event()
        self.entered = threading.Event()

    def publish(self, snapshot: Snapshot) -> None:
        self.entered.set()
        self.freed.wait()

    def close(self) -> None:
        self.freed.wait()


def test_a_way_out_that_hangs_or_refuses_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The body of ``monitored`` is the work of the agent: it is entered, done and left while a way out hangs."""
    made = eventful(tmp_path / "run")
    hanging, refusing = Hanging(), Endpoint
    monkeypatch.setattr(exporter, "CLOSE_S", 0.1)

    def refuse() -> exporter.Exit:
        return refusing(PrometheusConfig(port=1, host="192.0.2.1"), HERE, "0123abcd", dict)

    monkeypatch.setattr(exporter, "_openers", lambda *_: [refuse, lambda: hanging])
    events = EventLog.open(made.run, "agent-n1", 2)
    with monitored(made.run, TelemetryConfig(), HERE, events):
        assert hanging.entered.wait(30)
        made.train(3)
    hanging.freed.set()
    events.close()
    (warning,) = [event for event in made.run.read_events() if event["event"] == "warning"]
    assert "192.0.2.1:1" in warning["message"] and "continuing without a part" in warning["message"]


def until(found: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_otlp_sends_the_metrics_and_a_collector_that_hangs_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    snapshot = RunReader(eventful(tmp_path).run, WHO).read()
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        told: list[str] = []
        sender = exits.Otlp(LABELS, told.append)
        sender.publish(snapshot)
        connection, _ = server.accept()
        body = request_body(connection)
        monkeypatch.setattr(exits, "EXPORT_S", 0.1)
        for _ in range(50):
            sender.publish(snapshot)
        sender.close()
        connection.close()
    request = ExportMetricsServiceRequest.FromString(body)
    found = {metric.name: metric for metric in request.resource_metrics[0].scope_metrics[0].metrics}
    assert set(found) == {metrics.PREFIX + row.name for row in metrics.METRICS}
    (loss,) = found["hpc_train_loss"].gauge.data_points
    assert loss.as_double == 2.5 and {each.key: each.value.string_value for each in loss.attributes} == LABELS
    assert found["hpc_train_restarts"].sum.is_monotonic
    until(lambda: told)
    assert "does not accept the metrics of the run" in told[0]


def request_body(connection: socket.socket) -> bytes:
    """Returns the uncompressed body of an HTTP request; does not answer it."""
    file = connection.makefile("rb")
    length = 0
    while (line := file.readline().strip()) != b"":
        name, _, value = line.partition(b":")
        length = int(value) if name.lower() == b"content-length" else length
    return file.read(length)


@pytest.mark.parametrize("name", ["targets_dir", "token_file"])
def test_keys_of_an_endpoint_that_is_off_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"telemetry\.prometheus\.port is not set"):
        check_prometheus(PrometheusConfig(**{name: "/somewhere"}))
