"""The commands for runs that were submitted, and leaving a submission that waits."""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.doors.command import REPOSITORY, TINY
from tests.slurm.cluster import Cluster, wait_for
from tests.slurm.runs import (
    FAULTY,
    ONE_NODE,
    SLOW,
    events,
    every_step,
    job_id,
    status,
    steps,
    wait_for_step,
    with_python,
)


@pytest.mark.beside
def test_a_detached_run_is_found_watched_stopped_and_resumed(cluster: Cluster, tmp_path: Path) -> None:
    case = [*SLOW, *ONE_NODE, "train.steps=100", "launch.detach=true"]
    assert cluster.hpc_train(*case, "run.name=run", "-m", cwd=tmp_path).returncode == 0
    run = tmp_path / "outputs" / "run"
    wait_for_step(run, 3)
    mine = [row for row in status(cluster, Path("/")) if row["run"] == str(run)]
    assert [(row["state"], row["job_id"], row["steps"]) for row in mine] == [("running", job_id(run), 100)]
    assert cluster.hpc_train("cancel", "run", "--save", cwd=tmp_path).returncode == 0
    assert cluster.hpc_train("wait", "run", cwd=tmp_path).returncode == 75
    stopped_at = status(cluster, tmp_path, "run")[0]["step"]
    assert 3 <= stopped_at < 100
    resumed = cluster.hpc_train("resume", "outputs/run", "--json", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    ended = {key: value for key, value in json.loads(resumed.stdout).items() if key in ("run", "state", "exit_code")}
    assert ended == {"run": str(run), "state": "done", "exit_code": 0}
    assert every_step(run) == list(range(1, 101))
    assert status(cluster, tmp_path, "run")[0]["state"] == "done"
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
def test_the_failed_runs_of_a_sweep_are_tried_again(cluster: Cluster, tmp_path: Path) -> None:
    case = [*FAULTY, *ONE_NODE, "+model.args.call=3,99", "run.name=sweep"]
    assert cluster.hpc_train(*case, "-m", cwd=tmp_path).returncode == 1
    failed, good = (tmp_path / "outputs" / "sweep" / str(number) for number in range(2))
    log = cluster.hpc_train("logs", str(failed), cwd=tmp_path).stdout
    assert log.startswith("rank 1 on n"), "the failing rank is on top"
    assert "ArithmeticError" in log
    retried = cluster.hpc_train("retry", "--failed", "sweep", cwd=tmp_path)
    assert retried.returncode == 1, "it fails again"
    assert "resubmitting 1 of 2 runs" in retried.stdout
    assert len({event["launch"] for event in events(failed, "started")}) == 2
    assert len(events(good, "started")) == 1


@pytest.mark.beside
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGHUP])
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
