"""Jobs that are stopped ahead of their time limit or by a preemption go on; jobs that are cancelled do not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.runs import (
    ONE_NODE,
    SLOW,
    TWO_BY_TWO,
    detail,
    events,
    every_step,
    job_id,
    wait_for_step,
    wait_for_submission,
    wandb_ids,
)


def test_preemption_loses_no_step_and_keeps_the_wandb_run(cluster: Cluster, tmp_path: Path) -> None:
    case = [*SLOW, *TWO_BY_TWO, "train.steps=40", "telemetry.wandb.mode=offline", "cluster.partition=preempt"]
    process = cluster.start(*case, "run.name=run", "-m", cwd=tmp_path)
    run = tmp_path / "outputs" / "run"
    wait_for_step(run, 3)
    urgent = cluster.call("sbatch", "--parsable", "--nodes=4", "--exclusive", "--wrap=sleep 2", cwd=tmp_path)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    assert cluster.state(urgent.stdout.strip()) == "COMPLETED"
    assert every_step(run) == list(range(1, 41)), "each step was taken once"
    assert len(set(wandb_ids(run))) == 1
    assert len(wandb_ids(run)) == 2
    assert detail(cluster, job_id(run), "Restarts") == "1"


@pytest.mark.timeout(400)
def test_the_time_limit_loses_no_step_and_keeps_the_wandb_run(cluster: Cluster, tmp_path: Path) -> None:
    slow = [*SLOW, "+model.args.seconds=0.4", "train.steps=120", "telemetry.wandb.mode=offline"]
    case = [*slow, *ONE_NODE, "cluster.time=00:01:00", "elastic.stop_grace_s=20"]
    done = cluster.hpc_train(*case, "run.name=run", "-m", cwd=tmp_path, timeout=350)
    run = tmp_path / "outputs" / "run"
    assert done.returncode == 0, done.stdout + done.stderr
    assert every_step(run) == list(range(1, 121)), "each step was taken once"
    requeued = events(run, "requeued")
    assert len(requeued) >= 1
    assert len(set(wandb_ids(run))) == 1
    assert detail(cluster, job_id(run), "Restarts") == str(len(requeued))


def test_one_task_of_an_array_is_requeued_alone(cluster: Cluster, tmp_path: Path) -> None:
    case = [*SLOW, *ONE_NODE, "train.steps=30", "optim.lr=1e-3,3e-4"]
    process = cluster.start(*case, "run.name=sweep", "-m", cwd=tmp_path)
    other, asked = (tmp_path / "outputs" / "sweep" / str(number) for number in range(2))
    wait_for_step(asked, 3)
    assert job_id(asked).endswith("_1")
    cluster.call("scancel", "--signal=USR2", job_id(asked))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert every_step(asked) == every_step(other) == list(range(1, 31))
    assert len(events(asked, "started")) == 2
    assert len(events(other, "started")) == 1


def test_a_job_that_may_not_be_requeued_is_given_up(cluster: Cluster, tmp_path: Path) -> None:
    case = [*SLOW, *ONE_NODE, "train.steps=600", "elastic.max_requeues=0"]
    process = cluster.start(*case, "run.name=run", "-m", cwd=tmp_path)
    run = tmp_path / "outputs" / "run"
    wait_for_step(run, 2)
    cluster.call("scancel", "--signal=USR2", job_id(run))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 93, output
    assert "elastic.max_requeues" in output
    cluster.wait_for_state(job_id(run), "FAILED")
    assert detail(cluster, job_id(run), "ExitCode") == "93:0"


@pytest.mark.parametrize("phase", ["pending", "running", "saving", "requeued"])
def test_a_cancelled_job_never_comes_back(cluster: Cluster, tmp_path: Path, phase: str) -> None:
    never_comes_back(cluster, tmp_path, phase)


@pytest.mark.parametrize("phase", ["running", "requeued"])
def test_it_does_not_without_accounting_either(cluster_without_accounting: Cluster, tmp_path: Path, phase: str) -> None:
    never_comes_back(cluster_without_accounting, tmp_path, phase)


def never_comes_back(cluster: Cluster, tmp_path: Path, phase: str) -> None:
    begin = ["cluster.begin=now+1hour"] if phase == "pending" else []
    case = [*SLOW, *ONE_NODE, "train.steps=600", "launch.detach=true", *begin]
    left = cluster.hpc_train(*case, "run.name=run", "-m", cwd=tmp_path)
    assert left.returncode == 0, left.stdout + left.stderr
    run = tmp_path / "outputs" / "run"
    job = wait_for_submission(run)
    if phase != "pending":
        wait_for_step(run, 2)
    if phase in ("saving", "requeued"):
        cluster.call("scancel", "--signal=USR2", job)
    if phase == "requeued":
        cluster.wait_for_state(job, "PENDING")
    cluster.call("scancel", job)
    cluster.wait_for_state(job, "CANCELLED")
    time.sleep(6)  # cred_expire: a job that was requeued would be back by then
    assert cluster.state(job) == "CANCELLED"
    assert len(events(run, "started")) == (0 if phase == "pending" else 1)
    waited = cluster.hpc_train("wait", "run", "--json", cwd=tmp_path, timeout=60)
    assert waited.returncode != 0
    assert "cancelled" in waited.stdout
