"""Defines small runs for the tests on a cluster, and functions that read their state and results."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_train.run.directory import RunDirectory
from tests.slurm.cluster import Cluster, wait_for

_CASE = [
    "+strategy=dp",
    "cluster=slurm",
    "model=custom",
    "data=synthetic",
    "data.sequence_length=16",
    "data.validation_samples=8",
    "batch.global_size=8",
    "telemetry.log_every=1",
    "cluster.preflight_action.slow_device=warn",  # a speed measured beside other tests is noise
]
ONE_WORKER = ["cluster.nodes=1", "cluster.cpu_workers=1"]
ONE_NODE = ["cluster.nodes=1", "cluster.cpu_workers=2"]
TWO_BY_TWO = ["cluster.nodes=2", "cluster.cpu_workers=2"]
FAULTY = [*_CASE, "model._target_=tests.doors.faulty.Faulty", "train.steps=6", "telemetry.wandb.mode=disabled"]
SLOW = [*_CASE, "model._target_=tests.doors.faulty.Slow", "telemetry.wandb.mode=disabled"]  # 0.2 s per step


def with_python(cluster: Cluster) -> Cluster:
    """Returns ``cluster`` with this interpreter as ``python``, the command that batch scripts call."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{cluster.environment['PATH']}"
    return replace(cluster, environment={**cluster.environment, "PATH": path})


def status(cluster: Cluster, cwd: Path, *target: str) -> list[dict[str, Any]]:
    """Returns what ``status`` reports for each run."""
    done = cluster.hpc_train("status", *target, "--json", cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def why(cluster: Cluster, cwd: Path, name: str = "run") -> dict[str, Any]:
    """Returns what ``why`` reports for a run."""
    done = cluster.hpc_train("why", name, "--json", cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout))


def job_id(run: Path) -> str:
    return RunDirectory(run).record()["submissions"][-1]["job_id"]


def wait_for_submission(run: Path) -> str:
    wait_for(f"{run} to be submitted", lambda: bool(RunDirectory(run).record().get("submissions")), 60)
    return job_id(run)


def steps(run: Path) -> list[int]:
    return [line["step"] for line in RunDirectory(run).read_metrics()]


def losses(run: Path) -> list[float]:
    """Returns the loss of each step."""
    return [line["loss"] for line in RunDirectory(run).read_metrics()]


def wait_for_step(run: Path, step: int, seconds: float = 240) -> None:
    wait_for(f"step {step} of {run}", lambda: any(done >= step for done in steps(run)), seconds)


def every_step(run: Path) -> list[int]:
    """Returns the steps of all attempts in the order in which they were taken; a repeated step appears twice."""
    files = sorted((run / "metrics").glob("attempt-*.jsonl"))
    return [json.loads(line)["step"] for path in files for line in path.read_text().splitlines()]


def events(run: Path, *names: str) -> list[dict[str, Any]]:
    return [event for event in RunDirectory(run).read_events() if event["event"] in names]


def wandb_ids(run: Path) -> list[str]:
    """Returns the id of each W&B session, in the order of the attempts."""
    return [path.name.rpartition("-")[2] for path in sorted((run / "wandb").glob("offline-run-*"))]


def detail(cluster: Cluster, job: str, field: str) -> str:
    """Returns a field of ``scontrol show job``."""
    shown = cluster.call("scontrol", "show", "job", job).stdout
    return next((part.partition("=")[2] for part in shown.split() if part.startswith(f"{field}=")), "")
