"""How much slower a step is with all sinks on: runs with all of them and with none, in turn.

    python -m benchmarks.sinks [--pairs 10] [--steps 400] [--each] [overrides]

All means TensorBoard, W&B (offline), MLflow, the metrics file, the HTTP endpoint, which is scraped every second,
and OTLP; MLflow and OTLP send to stand-ins on this machine. ``--each`` measures each of them alone as well. Every step
is a line of metrics, and the monitoring is updated every second: both are more often than in a usual run.

The only worker computes in one thread, so that a second core is free for the agent, the tracking process and the
stand-ins, as on nodes with GPUs, whose cores are mostly idle. Where all cores compute, whatever else runs takes time
from a step; the processor time of the worker, which is measured as well, shows what the sinks cost the worker itself.

The time of a step is the median over the steps of a run, without the first tenth. The results are the medians of the
pairs' ratios, with the range of their middle half. The step time needs a quiet machine; the processor times of the
worker (its main thread, and all its threads) need none.
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
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_train.run.directory import RunDirectory
from hpc_train.train.hooks import Hook, HookContext
from tests.report.serving import LocalServer, QuietHandler, serving
from tests.telemetry.mlflow_service import service

ROOT = Path(__file__).parents[1]
CASE = [
    "+strategy=dp", "cluster=local", "cluster.cpu_workers=1", "train.threads=1", "data=synthetic",
    "data.validation_samples=8", "data.sequence_length=64", "train.eval_every=0", "checkpoint.every=0",
    "telemetry.log_every=1", "batch.global_size=8", "telemetry.prometheus.interval_s=1",
    "+hooks.processor_time._target_=benchmarks.sinks.ProcessorTime",
]  # fmt: skip
OFF = ["telemetry.wandb.mode=disabled"]
SINKS = {
    "tensorboard": [*OFF, "telemetry.tensorboard=true"],
    "wandb": ["telemetry.wandb.mode=offline"],
    "mlflow": [*OFF, "telemetry.mlflow.uri=auto"],
    "file": [*OFF, "telemetry.prometheus.file=auto"],
    "endpoint": [*OFF, "telemetry.prometheus.port=auto"],
    "otlp": [*OFF, "telemetry.otlp=true"],
}
ALL = [override for own in SINKS.values() for override in own if override not in OFF]


class ProcessorTime(Hook):
    """Writes the processor time of a step of this rank, without the first tenth of the steps, to the run directory."""

    def step(self, context: HookContext) -> None:
        first = context.total_steps // 10
        if context.step == first:
            self._began = time.process_time(), time.thread_time()
        if context.step == context.total_steps:
            steps = context.step - first
            process, main = time.process_time() - self._began[0], time.thread_time() - self._began[1]
            found = {"process": process / steps, "main_thread": main / steps}
            (context.run.path / "processor_time.json").write_text(json.dumps(found))


@dataclass(frozen=True)
class Times:
    """Seconds of one step: elapsed, and of the processor in all threads of the worker and in its main thread."""

    step: float
    process: float
    main_thread: float


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--each", action="store_true")
    options, overrides = parser.parse_known_args()
    cases = {"all": ALL} | (SINKS if options.each else {})
    with (
        tempfile.TemporaryDirectory(prefix="hpc_train-sinks-") as folder,
        serving(LocalServer(Accepting)) as collector,
        service() as mlflow,
    ):
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "MLFLOW_TRACKING_URI": mlflow.url}
        environment |= {"HPC_TRAIN_ROOT": folder, "PYTHONPATH": str(ROOT)}

        def run(name: str, sinks: Sequence[str]) -> Times:
            own = [*CASE, *sinks, f"train.steps={options.steps}", f"run.name={name}", *overrides]
            return times(Path(folder), name, own, environment)

        for case, sinks in cases.items():
            pairs: list[tuple[Times, Times]] = []
            for number in range(options.pairs):
                names = (f"{case}-{number}-off", OFF), (f"{case}-{number}-on", sinks)
                first, second = (run(*each) for each in (names if number % 2 == 0 else names[::-1]))
                pairs.append((first, second) if number % 2 == 0 else (second, first))
                off, on = pairs[-1]
                print(f"{case}, pair {number}: {1e3 * off.step:.3f} ms off, {1e3 * on.step:.3f} ms on", flush=True)
            print(json.dumps({"sinks": case, "pairs": len(pairs)} | slower(pairs)), flush=True)


def slower(pairs: Sequence[tuple[Times, Times]]) -> dict[str, dict[str, float]]:
    """Returns for each kind of time by how many percent it is longer."""
    kinds = "step", "process", "main_thread"
    return {kind: summary([getattr(on, kind) / getattr(off, kind) for off, on in pairs]) for kind in kinds}


def summary(ratios: Sequence[float]) -> dict[str, float]:
    """Returns by how many percent a time is longer: the median of the pairs, and the quartiles of their middle half."""
    percent = [100 * (ratio - 1) for ratio in ratios]
    low, median, high = statistics.quantiles(percent, n=4) if len(percent) > 1 else percent * 3
    return {"slower_percent": round(median, 3), "from": round(low, 3), "to": round(high, 3)}


def times(folder: Path, name: str, arguments: Sequence[str], environment: dict[str, str]) -> Times:
    """Trains one run and returns the times of its steps in seconds."""
    run = RunDirectory(folder / name)
    command = [sys.executable, "-m", "hpc_train", *arguments]
    with scraped(run):
        subprocess.run(command, env=os.environ | environment, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    steps = [line["step_s"] for line in run.read_metrics()]
    processor = json.loads((run.path / "processor_time.json").read_text())
    return Times(statistics.median(steps[len(steps) // 10 :]), **processor)


@contextmanager
def scraped(run: RunDirectory) -> Iterator[None]:
    """Reads the endpoint of the run, if it has one, every second, as Prometheus does."""
    ended = threading.Event()

    def scrape() -> None:
        while not ended.wait(1.0):
            with suppress(OSError):
                served = run.record().get("prometheus")
                if served:
                    urllib.request.urlopen(served["url"], timeout=5).read()

    scraper = threading.Thread(target=scrape)
    scraper.start()
    try:
        yield
    finally:
        ended.set()
        scraper.join()


class Accepting(QuietHandler):
    """Accepts everything, as a collector of OpenTelemetry."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._send(b"")


if __name__ == "__main__":
    main()
