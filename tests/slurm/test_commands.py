"""The commands for runs that were submitted, and leaving a submission that waits."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoint.progress import IN_LONG_FORM, LONG
from tests.doors.command import REPOSITORY, TINY
from tests.slurm.cluster import Cluster, wait_for
from tests.slurm.runs import (
    FAULTY,
    ONE_NODE,
    SLOW,
    detail,
    events,
    every_step,
    job_id,
    status,
    steps,
    wait_for_step,
    why,
    with_python,
)
from tests.telemetry import mlflow_service
from tests.telemetry.test_mlflow import real_server


@pytest.mark.beside
def test_a_detached_run_is_found_watched_stopped_and_resumed(cluster: Cluster, tmp_path: Path) -> None:
    case = [*SLOW, *ONE_NODE, "train.steps=100", "launch.detach=true", "cluster.exclude=n3,n4"]
    assert cluster.hpc_train(*case, "run.name=run", "-m", cwd=tmp_path).returncode == 0
    run = tmp_path / "outputs" / "run"
    wait_for_step(run, 3)
    assert detail(cluster, job_id(run), "ExcNodeList") == "n[3-4]", "one job, not a sweep of two"
    mine = [row for row in status(cluster, Path("/")) if row["run"] == str(run)]
    assert [(row["state"], row["job_id"], row["steps"]) for row in mine] == [("running", job_id(run), 100)]
    assert cluster.hpc_train("cancel", "run", "--save", cwd=tmp_path).returncode == 0
    assert cluster.hpc_train("wait", "run", cwd=tmp_path).returncode == 75
    stopped_at = status(cluster, tmp_path, "run")[0]["step"]
    assert 3 <= stopped_at < 100
    resumed = cluster.hpc_train("resume", "outputs/run", "--json", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert {"run": str(run), "state": "done", "exit_code": 0}.items() <= json.loads(resumed.stdout).items()
    assert every_step(run) == list(range(1, 101))
    assert status(cluster, tmp_path, "run")[0]["state"] == "done"
    cluster.wait_for_state(job_id(run), "COMPLETED")
    cluster.call("scontrol", "requeuehold", job_id(run))
    assert why(cluster, tmp_path)["waiting"]["fix"] == f"scancel {job_id(run)}", (
        "releasing the job of a run that is done gains nothing"
    )
    cluster.call("scancel", job_id(run))
    cluster.wait_for_state(job_id(run), "CANCELLED")
    assert (
        "cancelling 0 of 1 job; 1 is not waiting or running" in cluster.hpc_train("cancel", "run", cwd=tmp_path).stdout
    )
    log = cluster.hpc_train("logs", str(run), "--rank", "all", "--attempt", "0", cwd=tmp_path).stdout.splitlines()
    assert log == sorted(log, key=lambda line: line[:23])
    assert any(f"step {stopped_at}/100" in line for line in log)
    comment = re.compile(rf"hpc_train:{re.escape(str(run))} goodput=[01]\.\d\d\n")
    wait_for(
        "the comment of the job in the accounting", lambda: comment.fullmatch(_comment(cluster, run)) is not None, 60
    )


def _comment(cluster: Cluster, run: Path) -> str:
    return cluster.call("sacct", "-nPX", "--jobs", job_id(run), "--format=Comment").stdout


@pytest.mark.beside
@pytest.mark.long_form(25)  # tests/runs/test_logs.py
def test_the_log_of_a_live_run_is_followed_to_its_end(cluster: Cluster, tmp_path: Path) -> None:
    case = [*SLOW, *ONE_NODE, "train.steps=40", "launch.detach=true"]
    assert cluster.hpc_train(*case, "run.name=run", "-m", cwd=tmp_path).returncode == 0
    run = tmp_path / "outputs" / "run"
    wait_for_step(run, 2)
    following = cluster.start("logs", "-f", "run", cwd=tmp_path)
    assert following.stdout is not None
    seen = next(line for line in following.stdout if "step 2/40" in line)
    assert 40 not in steps(run), "it is shown while the run is at work"
    rest, _ = following.communicate(timeout=240)
    assert following.returncode == 0, seen + rest
    assert "step 40/40" in rest


@pytest.mark.beside
@pytest.mark.long_form(30)  # the first test stops and resumes
def test_a_run_is_resumed_right_after_it_was_cancelled(cluster: Cluster, tmp_path: Path) -> None:
    """Though its job has not left yet, and the command that submitted it still waits in another terminal."""
    case = [*SLOW, *ONE_NODE, "train.steps=80", "checkpoint.every=5", "run.name=run", "-m"]
    waiting = cluster.start(*case, cwd=tmp_path)
    run = tmp_path / "outputs" / "run"
    wait_for_step(run, 7)
    first = job_id(run)
    assert cluster.hpc_train("cancel", "run", cwd=tmp_path).returncode == 0
    resumed = cluster.hpc_train("resume", "run", "--json", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert {"run": str(run), "state": "done", "exit_code": 0}.items() <= json.loads(resumed.stdout).items()
    assert job_id(run) != first
    assert cluster.state(first) == "CANCELLED"
    assert steps(run) == list(range(1, 81))
    waiting.communicate(timeout=120)


MODEL = """
from torch import nn


class Table(nn.Module):
    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 256)
        self.wrong = wrong

    def forward(self, inputs):
        if self.wrong and self.training:
            raise ValueError("the sign is wrong")
        return self.table(inputs)
"""


@pytest.mark.long_form(80)
@pytest.mark.beside
def test_the_failed_runs_of_a_sweep_are_tried_again(cluster: Cluster, tmp_path: Path) -> None:
    """First with the code as it was frozen, then with the corrected code."""
    model = tmp_path / "own_model.py"
    model.write_text(MODEL)
    (tmp_path / ".gitignore").write_text("outputs/\n")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    path = f"{tmp_path}{os.pathsep}{cluster.environment['PYTHONPATH']}"
    own = replace(cluster, environment=cluster.environment | {"PYTHONPATH": path})
    case = [*FAULTY, *ONE_NODE, "model._target_=own_model.Table", "+model.args.wrong=true,false", "run.name=sweep"]
    done = own.hpc_train(*case, "-m", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "python -m hpc_train retry --failed outputs/sweep --code now" in done.stdout
    failed, good = (tmp_path / "outputs" / "sweep" / str(number) for number in range(2))
    found = own.hpc_train("why", "sweep", cwd=tmp_path).stdout
    assert "user_error in 1 run: ValueError: the sign is wrong" in found, found
    assert "outputs/sweep/0" in found and "outputs/sweep/1" not in found, found
    log = own.hpc_train("logs", str(failed), cwd=tmp_path).stdout
    assert log.startswith("rank ") and "ValueError: the sign is wrong" in log, "the failing rank is on top"
    model.write_text(MODEL.replace("self.wrong and", "not self.wrong and"))
    retried = own.hpc_train("retry", "--failed", "sweep", cwd=tmp_path)
    assert retried.returncode == 1, "it fails again"
    assert "resubmitting 1 of 2 runs" in retried.stdout
    assert f"{tmp_path} has changed since its code was frozen; the frozen code runs again" in retried.stdout
    retried = own.hpc_train("retry", "--failed", "sweep", "--code", "now", cwd=tmp_path)
    assert retried.returncode == 0, retried.stdout + retried.stderr
    assert f"the present code of {tmp_path}" in retried.stdout
    assert steps(failed) == list(range(1, 7))
    assert len({event["launch"] for event in events(failed, "started")}) == 3
    assert len(events(good, "started")) == 1


@pytest.mark.beside
@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGHUP, marks=IN_LONG_FORM)])
@pytest.mark.long_form(30)  # tests/launch/test_submission.py
def test_who_leaves_a_waiting_submission_leaves_the_job_alone(
    cluster: Cluster, tmp_path: Path, how: signal.Signals
) -> None:
    process = cluster.start(*SLOW, *ONE_NODE, "train.steps=25", "run.name=run", "-m", cwd=tmp_path)
    run = tmp_path / "outputs" / "run"
    wait_for_step(run, 2)
    os.killpg(process.pid, how)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 130, output
    assert "hpc_train logs -f outputs/run" in output
    waited = cluster.hpc_train("wait", "run", cwd=tmp_path)
    assert waited.returncode == 0, waited.stdout + waited.stderr
    assert every_step(run) == list(range(1, 26))


@pytest.mark.beside
@pytest.mark.long_form(45)  # tests/runs/test_comparison.py, tests/report/test_registry.py
def test_a_ci_job_trains_compares_and_keeps_the_report(cluster: Cluster, tmp_path: Path) -> None:
    script = str(REPOSITORY / "deploy" / "ci" / "train.sh")
    case = [part for part in [*TINY, *ONE_NODE, "+strategy=dp"] if not part.startswith("train.steps")]
    shell = with_python(cluster)
    ci = replace(shell, environment=shell.environment | {"RUN_NAME": "ci-1234"})
    smoke = ci.call(script, "smoke", *case, cwd=tmp_path)
    assert smoke.returncode == 0, smoke.stdout + smoke.stderr
    outputs = tmp_path / "outputs"
    assert every_step(outputs / "ci-1234-smoke") == list(range(1, 21))
    assert "<html" in (tmp_path / "report.html").read_text()
    (outputs / "last-good").write_text("outputs/ci-1234-smoke\n")
    worse = replace(ci, environment=ci.environment | {"FAIL_IF": "loss<0; loss>0*baseline", "REPORT": "full.html"})
    full = worse.call(script, "full", *case, "train.steps=4", cwd=tmp_path)
    assert full.returncode == 1, full.stdout + full.stderr
    assert "(--fail-if 'loss>0*baseline')" in full.stderr
    assert "loss<0" not in full.stderr
    assert (outputs / "last-good").read_text() == "outputs/ci-1234-smoke\n"
    assert (tmp_path / "full.html").is_file()
    (outputs / "last-good").write_text("outputs/ci-1234\n")  # the job of the last good run may be run again
    with _registry(tmp_path) as url:
        promotes = {"PROMOTE_TO": "mlflow", "MODEL": "net", "MLFLOW_TRACKING_URI": url}
        good = replace(ci, environment=ci.environment | promotes)
        full = good.call(script, "full", *case, "train.steps=4", cwd=tmp_path)
    assert full.returncode == 0, full.stdout + full.stderr
    assert "step 4 is version 1 of net as production" in full.stdout
    assert every_step(outputs / "ci-1234") == [1, 2, 3, 4], "a run that is done is not repeated"


@contextmanager
def _registry(folder: Path) -> Iterator[str]:
    """Yields the address of an MLflow server: the real one in the long form, or else a stand-in."""
    if LONG:
        with real_server(folder) as url:
            yield url
    else:
        with mlflow_service.service() as server:
            yield server.url
