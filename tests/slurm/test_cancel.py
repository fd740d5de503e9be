"""A job that is cancelled never comes back, in whatever phase it is."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.checkpoint.progress import IN_LONG_FORM
from tests.slurm.cluster import Cluster
from tests.slurm.runs import ONE_NODE, SLOW, events, wait_for_step, wait_for_submission


@pytest.mark.beside
@pytest.mark.parametrize("phase", ["pending", pytest.param("running", marks=IN_LONG_FORM), "saving", "requeued"])
@pytest.mark.long_form(25, cases=["saving"])
def test_a_cancelled_job_never_comes_back(cluster: Cluster, tmp_path: Path, phase: str) -> None:
    never_comes_back(cluster, tmp_path, phase)


@pytest.mark.beside
@pytest.mark.parametrize("phase", ["running", pytest.param("requeued", marks=IN_LONG_FORM)])
@pytest.mark.long_form(25)  # it does with accounting
def test_it_does_not_without_accounting_either(plain: Cluster, tmp_path: Path, phase: str) -> None:
    never_comes_back(plain, tmp_path, phase)


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
    waited = cluster.hpc_train("wait", "run", "--json", cwd=tmp_path)
    assert waited.returncode != 0
    assert "cancelled" in waited.stdout
