"""How much slower a step is with all sinks on: runs with all of them and with none, in turn.

    python -m tests.benchmarks.sinks [--pairs 10] [--steps 400] [overrides]

All means TensorBoard, CSV, W&B (offline), MLflow, the metrics file, the HTTP endpoint, which is scraped every second,
and OTLP; MLflow and OTLP send to stand-ins on this machine. Every step is a line of metrics, and
the monitoring is updated every second: both are more often than in a usual run. The time of a step is the median over
the steps of a run, without the first tenth. The result is the median of the pairs' ratios, with the range of its middle
half. It needs a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from hpc_train.run.directory import RunDirectory
from tests.telemetry.mlflow_service import service

ROOT = Path(__file__).parents[2]
CASE = [
    "+strategy=dp", "cluster=local", "cluster.cpu_workers=1", "data=synthetic", "data.validation_samples=8",
    "data.sequence_length=64",
    "train.eval_every=0", "checkpoint.every=0", "telemetry.log_every=1", "batch.global_size=8",
]  # fmt: skip
OFF = ["telemetry.wandb.mode=disabled"]
ON = [
    "telemetry.wandb.mode=offline", "telemetry.tensorboard=true", "telemetry.csv=true", "telemetry.otlp=true",
    "telemetry.prometheus.file=auto", "telemetry.prometheus.port=auto", "telemetry.prometheus.interval_s=1",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=400)
    options, overrides = parser.parse_known_args()
    ratios: list[float] = []
    with tempfile.TemporaryDirectory(prefix="hpc_train-sinks-") as folder, accepting() as url, service() as mlflow:
        on = [*ON, f"telemetry.mlflow.uri={mlflow.url}"]
        for pair in range(options.pairs):
            times = {}
            for name, sinks in (("off", OFF), ("on", on)) if pair % 2 == 0 else (("on", on), ("off", OFF)):
                own = [*CASE, *sinks, f"train.steps={options.steps}", f"run.name={name}-{pair}", *overrides]
                times[name] = step_time(Path(folder), f"{name}-{pair}", own, url)
            ratios.append(times["on"] / times["off"])
            print(f"pair {pair}: {1e3 * times['off']:.3f} ms without, {1e3 * times['on']:.3f} ms with", flush=True)
    print(json.dumps(summary(ratios)))


def summary(ratios: Sequence[float]) -> dict[str, float]:
    """Returns by how many percent a step is slower: the median of the pairs, and the quartiles of their middle half."""
    percent = [100 * (ratio - 1) for ratio in ratios]
    low, median, high = statistics.quantiles(percent, n=4) if len(percent) > 1 else percent * 3
    return {"slower_percent": round(median, 3), "from": round(low, 3), "to": round(high, 3), "pairs": len(percent)}


def step_time(folder: Path, name: str, arguments: Sequence[str], url: str) -> float:
    """Trains one run and returns the median time of its steps in seconds."""
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "HPC_TRAIN_ROOT": str(folder), "PYTHONPATH": str(ROOT)}
    run = RunDirectory(folder / name)
    command = [sys.executable, "-m", "hpc_train", *arguments]
    ended = threading.Event()
    scraper = threading.Thread(target=scrape, args=(run, ended))
    scraper.start()
    try:
        subprocess.run(command, env=os.environ | environment, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    finally:
        ended.set()
        scraper.join()
    times = [line["step_s"] for line in run.read_metrics()]
    return statistics.median(times[len(times) // 10 :])


def scrape(run: RunDirectory, ended: threading.Event) -> None:
    """Reads the endpoint of the run every second, as Prometheus does."""
    while not ended.wait(1.0):
        with suppress(OSError):
            served = run.record().get("prometheus")
            if served:
                urllib.request.urlopen(served["url"], timeout=5).read()


@contextmanager
def accepting() -> Iterator[str]:
    """Yields the URL of a server that accepts everything, as a collector of OpenTelemetry."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """Requests are not printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    main()
