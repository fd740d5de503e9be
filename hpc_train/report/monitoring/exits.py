"""Exports the metrics of a run to a file and an HTTP endpoint for Prometheus, and by OTLP over HTTP.

There is one endpoint per run, in the agent of node 0. The file in ``telemetry.prometheus.targets_dir``, by which
Prometheus finds it, sets the label ``instance`` to the id of the run. The series therefore continue when the job starts
again on another node or port.

The address, headers and time limits of OTLP come from the environment variables that OpenTelemetry defines, e.g.
OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4318.
"""

from __future__ import annotations

import hmac
import logging
import math
import os
import secrets
import socket
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any

from hpc_train.config.schema import PrometheusConfig
from hpc_train.errors import UserError
from hpc_train.machine.allocation import LOOPBACK, Allocation
from hpc_train.report.monitoring.metrics import COUNTER, GAUGE, METRICS, PREFIX, Metric, Snapshot
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import write_json, write_text

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Observation
    from prometheus_client import Metric as Family


AUTO = "auto"
TOKEN_FILE = "~/.config/hpc_train/prometheus.token"
REQUEST_S = 2.0  # the time that a client has to send its request; the endpoint serves one request at a time


@dataclass
class _Collector:
    """Gives the newest snapshot to ``prometheus_client``."""

    snapshot: Snapshot

    def collect(self) -> Iterator[Family]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families = {COUNTER: CounterMetricFamily, GAUGE: GaugeMetricFamily}
        run_labels = self.snapshot.labels
        for metric in METRICS:
            samples = self.snapshot.samples.get(metric.name)
            if samples:
                create = families[metric.kind]
                family = create(PREFIX + metric.name, metric.meaning, labels=[*run_labels, *metric.labels])
                for labels, value in samples.items():
                    family.add_metric([*run_labels.values(), *labels], value)
                yield family


def text_of(snapshot: Snapshot, accept: str = "") -> tuple[bytes, str]:
    """Returns the snapshot in the format that an Accept header requests, and the content type.

    Without a header it is the text format of Prometheus, which the textfile collector of the node exporter reads.
    """
    from prometheus_client.exposition import choose_encoder

    encode, content_type = choose_encoder(accept)
    return encode(_Collector(snapshot)), content_type  # type: ignore[arg-type]


class MetricsFile:
    """Replaces a file with the metrics, atomically. ``where`` is ``telemetry.prometheus.file``: auto for
    ``metrics/current.prom`` in the run directory, a file, or a directory, such as that of a node exporter's textfile
    collector."""

    def __init__(self, where: str, run: RunDirectory, run_id: str) -> None:
        self.path = run.metrics / "current.prom"
        self._is_shared = False
        if where != AUTO:
            self.path = Path(where)
            self._is_shared = self.path.suffix != ".prom"
        if self._is_shared:
            self.path /= f"hpc_train_{run_id}.prom"

    def publish(self, snapshot: Snapshot) -> None:
        write_text(self.path, text_of(snapshot)[0].decode())

    def close(self) -> None:
        """Removes the file from a directory of other files: otherwise the node exporter would export its values
        forever.
        """
        if self._is_shared:
            self.path.unlink(missing_ok=True)


class Endpoint:
    """Serves the metrics at ``http://HOST:PORT/metrics`` until it is closed, and records its address meanwhile.

    Args:
        record: writes fields of ``run.json``.

    Attributes:
        address: HOST:PORT, as Prometheus reaches it.
        token_file: the file with the token that a client must send; None on the loopback interface without a token.

    Raises:
        UserError: no address or port can be used, or the file with the token is not private.
        OSError: the target or the token cannot be written.
    """

    def __init__(
        self, settings: PrometheusConfig, allocation: Allocation, run_id: str, record: Callable[..., object]
    ) -> None:
        self._record = record
        self._snapshot: Snapshot | None = None
        self._server, host = _listen(settings, allocation, self._handler())
        self.address = f"{host}:{self._server.server_address[1]}"
        self._target: Path | None = None
        try:
            self.token_file, self._token = _token(settings.token_file, str(self._server.server_address[0]))
            if settings.targets_dir is not None:
                self._target = Path(settings.targets_dir) / f"hpc_train_{run_id}.json"
                self._target.parent.mkdir(parents=True, exist_ok=True)
                write_json(self._target, [{"targets": [self.address], "labels": {"instance": run_id}}])
        except (OSError, UserError):
            self._server.server_close()
            raise
        serve = partial(self._server.serve_forever, poll_interval=0.1)
        self._thread = threading.Thread(target=serve, name="metrics endpoint", daemon=True)
        self._thread.start()
        token_file = None if self.token_file is None else str(self.token_file)
        record(prometheus={"url": f"http://{self.address}/metrics", "token_file": token_file})

    def publish(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def close(self) -> None:
        if self._target is not None:
            self._target.unlink(missing_ok=True)
        self._server.shutdown()
        self._server.server_close()
        self._record(prometheus=None)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            timeout = REQUEST_S

            def do_GET(self) -> None:
                status, body, content_type = endpoint._answer(self.path, self.headers)
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Prints nothing."""

        return Handler

    def _answer(self, path: str, headers: Any) -> tuple[int, bytes, str]:
        given = headers.get("Authorization", "").encode("utf-8", "replace")
        if self._token is not None and not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            return 401, b"the token is missing or wrong\n", "text/plain"
        if path.partition("?")[0] != "/metrics":
            return 404, b"the metrics are at /metrics\n", "text/plain"
        if self._snapshot is None:
            return 503, b"there are no metrics yet\n", "text/plain"
        return 200, *text_of(self._snapshot, headers.get("Accept", ""))


class _Server(TCPServer):
    """Serves HTTP; unlike ``HTTPServer`` it does not look up the full name of the host, which may take seconds."""

    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that are too slow or disconnect, since they do not concern the run."""


def _listen(
    settings: PrometheusConfig, allocation: Allocation, handler: type[BaseHTTPRequestHandler]
) -> tuple[TCPServer, str]:
    """Returns a server on the first usable address, and its host name or address.

    In a job, this is the address at which the nodes connect, or the name of the only node; elsewhere it is loopback.
    """
    port = 0
    if settings.port not in (AUTO, None):
        port = int(str(settings.port))
    hosts = [settings.host]
    if settings.host == AUTO:
        hosts = [LOOPBACK]
        if allocation.job_id is not None:
            of_job = allocation.address if allocation.nodes > 1 else allocation.node_name
            hosts = [of_job, socket.gethostname(), LOOPBACK]
    problems = []
    for host in hosts:
        try:
            return _Server((host, port), handler), host
        except OSError as error:
            problems.append(f"{host}:{port}: {error.strerror or error}")
    raise UserError(
        f"the metrics cannot be served: {'; '.join(problems)}",
        where="telemetry.prometheus.port",
        fix="set telemetry.prometheus.port=auto, or telemetry.prometheus.host to an address of the node",
    )


def _token(given: str | None, address: str) -> tuple[Path | None, str | None]:
    """Returns the file with the token and the token; creates the default file on an address that others can reach."""
    if given is None and address.startswith("127."):
        return None, None
    path = Path(given or TOKEN_FILE).expanduser()
    if given is None and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(32))
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        fix = f"chmod 600 {path}"
        raise UserError(f"other users may read the token in {path}", where="telemetry.prometheus.token_file", fix=fix)
    token = path.read_text(encoding="utf-8").strip()
    if not token:
        fix = "write a token into the file, e.g. the output of `openssl rand -hex 32`"
        raise UserError(f"{path} is empty", where="telemetry.prometheus.token_file", fix=fix)
    return path, token


ENDPOINTS = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
EXPORT_S = 10.0  # time limit of one export, with its retries
UNITS = {"seconds": "s", "bytes": "By", "bytes/second": "By/s", "1/second": "1/s", "ratio": "1", "": "1"}


class Otlp:
    """Exports each published snapshot in a separate thread. ``notify`` is called with a message when exports begin to
    fail."""

    def __init__(self, labels: Mapping[str, str], notify: Callable[[str], object]) -> None:
        self._notify = notify
        self._labels = labels
        self._snapshot: Snapshot | None = None
        self._wanted = threading.Event()
        self._closed = False
        self._failing = False
        self._thread = threading.Thread(target=self._work, name="otlp", daemon=True)
        self._thread.start()

    def publish(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._wanted.set()

    def close(self) -> None:
        """Exports the newest snapshot, in bounded time."""
        self._closed = True
        self._wanted.set()
        self._thread.join(EXPORT_S)

    def _work(self) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it prints every failed export with a traceback
        try:
            collect = self._start()
        except Exception as error:  # from any of the packages that it uses
            self._notify(f"OTLP: {type(error).__name__}: {error}; continuing without it")
            return
        while True:
            self._wanted.wait()
            self._wanted.clear()
            closed = self._closed
            collect()
            if closed:
                return

    def _start(self) -> Callable[[], object]:
        """Returns a function that exports the newest snapshot."""
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import MetricExportResult, PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource

        otlp = self

        class Exporter(OTLPMetricExporter):
            def export(self, *arguments: Any, **named: Any) -> MetricExportResult:
                result = super().export(*arguments, **named)
                otlp._report(result is MetricExportResult.SUCCESS)
                return result

        # without an interval it has no thread, which a fork would start again in the child
        reader = PeriodicExportingMetricReader(Exporter(timeout=EXPORT_S), export_interval_millis=math.inf)
        resource = {"service.name": "hpc_train", "service.instance.id": self._labels["run_id"]}
        provider = MeterProvider([reader], Resource.create(resource), shutdown_on_exit=False)
        meter = provider.get_meter("hpc_train")
        for metric in METRICS:
            create = getattr(meter, f"create_observable_{metric.kind}")
            create(PREFIX + metric.name, [partial(self._observe, metric)], UNITS[metric.unit], metric.meaning)
        return reader.collect

    def _observe(self, metric: Metric, options: CallbackOptions) -> Iterable[Observation]:
        from opentelemetry.metrics import Observation

        snapshot = self._snapshot
        if snapshot is None:
            return
        for labels, value in snapshot.samples.get(metric.name, {}).items():
            yield Observation(value, {**snapshot.labels, **dict(zip(metric.labels, labels, strict=True))})

    def _report(self, succeeded: bool) -> None:
        if not succeeded and not self._failing:
            address = next((os.environ[name] for name in ENDPOINTS if name in os.environ), "http://localhost:4318")
            self._notify(f"OTLP: {address} does not accept the metrics of the run; hpc_train keeps trying")
        self._failing = not succeeded
