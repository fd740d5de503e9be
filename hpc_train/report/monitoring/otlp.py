"""Sends the metrics of a run to an OpenTelemetry collector (OTLP over HTTP).

The address, headers and time limits are those of the environment variables that OpenTelemetry defines, e.g.
OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4318. Only the newest snapshot is kept, so that a collector that hangs or
refuses costs no memory.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from hpc_train.report.monitoring.names import COUNTER, METRICS, PREFIX, Metric
from hpc_train.report.monitoring.snapshot import Snapshot

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Observation

ENDPOINTS = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
EXPORT_S = 10.0  # time limit of one export, with its retries
UNITS = {"seconds": "s", "bytes": "By", "bytes/second": "By/s", "1/second": "1/s", "ratio": "1", "": "1"}


class Otlp:
    """Exports each published snapshot in a separate thread.

    Args:
        tell: called with a message when exports begin to fail.
    """

    def __init__(self, labels: Mapping[str, str], tell: Callable[[str], object]) -> None:
        self._tell = tell
        self._labels = labels
        self._snapshot: Snapshot | None = None
        self._wanted = threading.Event()
        self._closed = False
        self._failing = False
        self._thread = threading.Thread(target=self._work, name="otlp", daemon=True)
        self._thread.start()

    def publish(self, snapshot: Snapshot) -> None:
        """Replaces the snapshot that is exported next."""
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
        except Exception as error:  # of the many packages below
            self._tell(f"OTLP: {type(error).__name__}: {error}; continuing without it")
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
            is_counter = metric.kind == COUNTER
            create = meter.create_observable_counter if is_counter else meter.create_observable_gauge
            create(PREFIX + metric.name, [partial(self._observe, metric)], UNITS[metric.unit], metric.meaning)
        return reader.collect

    def _observe(self, metric: Metric, options: CallbackOptions) -> Iterable[Observation]:
        from opentelemetry.metrics import Observation

        snapshot = self._snapshot
        if snapshot is None:
            return
        for own, value in snapshot.samples.get(metric.name, {}).items():
            yield Observation(value, {**snapshot.labels, **dict(zip(metric.labels, own, strict=True))})

    def _report(self, succeeded: bool) -> None:
        if not succeeded and not self._failing:
            address = next((os.environ[name] for name in ENDPOINTS if name in os.environ), "http://localhost:4318")
            self._tell(f"OTLP: {address} does not accept the metrics of the run; hpc_train keeps trying")
        self._failing = not succeeded
