"""Runs ``python -m hpc_train`` for a check, and reads what the run has written."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_checks.check import Probe

ROOT = Path(__file__).parents[1]
SYNTHETIC = ["data=synthetic", "data.validation_samples=8"]
SMALL = [
    "batch.global_size=8",
    "train.steps=10",
    "telemetry.log_every=1",
    "telemetry.wandb.mode=disabled",
    "optim.warmup_steps=0",
    "checkpoint.every=0",
    "cluster.preflight=off",
    "cluster=local",
]
TINY = ["data.vocab_size=256", "data.sequence_length=32"]
LOG_BYTES = 20_000  # of a run's logs that a failed check shows


@dataclass(frozen=True)
class Command:
    """A command that has ended."""

    code: int
    output: str

    def json(self) -> dict[str, Any]:
        """Parses the last line of the output."""
        found: dict[str, Any] = json.loads(self.output.strip().splitlines()[-1])
        return found


@dataclass(frozen=True)
class Run:
    """A training that has ended, and its files."""

    path: Path
    code: int
    output: str

    def losses(self) -> dict[int, float]:
        """Returns the loss of each step; of a step that ran twice the last one."""
        return {line["step"]: line["loss"] for line in self.metrics()}

    def metrics(self) -> list[dict[str, Any]]:
        return _lines(self.path / "metrics")

    def events(self, *names: str) -> list[dict[str, Any]]:
        """Returns the events of these names in the order of their times."""
        found = [event for event in _lines(self.path / "events") if event["event"] in names]
        return sorted(found, key=lambda event: float(event["time"]))

    def logs(self) -> str:
        """Returns the end of each log of the workers."""
        texts = (f"--- {log.name}\n{log.read_text(errors='replace')[-LOG_BYTES:]}" for log in self.log_files())
        return "\n".join(texts)

    def log_files(self) -> list[Path]:
        return sorted((self.path / "logs").glob("*.log"))


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]


def hpc_train(*arguments: str, timeout: float = 300, **environment: str) -> Command:
    """Runs one command in the source tree."""
    command = [sys.executable, "-m", "hpc_train", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, cwd=ROOT, env=clean_environment() | environment,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    print(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}", flush=True)  # kept if the check fails
    return Command(done.returncode, done.stdout)


def clean_environment() -> dict[str, str]:
    """Returns the environment without the variables of a Slurm job and of W&B."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "WANDB_"))}


def train(
    probe: Probe, name: str, *overrides: str, ranks: int = 1, on_gpu: bool | None = None, ends: int | None = 0,
    timeout: float = 300, environment: Mapping[str, str] | None = None,
) -> Run:  # fmt: skip
    """Trains in ``probe.folder`` on ``ranks`` GPUs, or CPU ranks.

    Args:
        on_gpu: None takes GPUs if there are any.
        ends: the expected exit code; None for any.
        environment: variables to set.

    Raises:
        RuntimeError: the command ended with another exit code; the message has the end of the logs.
    """
    gpus = ranks if (probe.on_gpu if on_gpu is None else on_gpu) else 0
    place = [f"cluster.gpus_per_node={gpus}", *([] if gpus else cpu_ranks(ranks))]
    where = [f"run.root={probe.folder}", f"run.name={name}"]
    done = hpc_train(*SYNTHETIC, *SMALL, *place, *where, *overrides, timeout=timeout, **(environment or {}))
    run = Run(probe.folder / name, done.code, done.output)
    if ends is not None and done.code != ends:
        raise RuntimeError(f"{name} ended with {done.code}, not {ends}\n{run.logs()}")
    return run


def at_once(*runs: Callable[[], Run]) -> list[Run]:
    """Makes trainings at the same time, whose speed is not measured: most of their seconds are those of a start."""
    with ThreadPoolExecutor(len(runs)) as pool:
        return [started.result() for started in [pool.submit(run) for run in runs]]


def cpu_ranks(ranks: int) -> list[str]:
    """Returns the overrides of ranks without GPUs. The threads of tiny models would wait for each other's cores."""
    return [f"cluster.cpu_workers={ranks}", "train.threads=1"]


def largest_difference(found: dict[int, float], wanted: dict[int, float]) -> float:
    """Returns the largest relative difference over all steps; infinite if the steps differ, NaN if a value is."""
    if found.keys() != wanted.keys() or not found:
        return float("inf")
    differences = [abs(found[step] - wanted[step]) / abs(wanted[step]) for step in wanted]
    return max(differences, key=lambda value: math.inf if math.isnan(value) else value)
