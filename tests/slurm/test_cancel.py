"""A job that is cancelled never comes back, in whatever phase it is."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.runs import ONE_NODE, SLOW, events, wait_for_step, wait_for_submission


@pytest.mark.parametrize(
    ("name", "phase"), [("plain", "pending"), ("plain", "running"), ("cluster", "saving"), ("cluster", "requeued")]
)
@pytest.mark.long_form(30)  # test_batch_scripts.py cancels a job in the moment before its requeue
def test_a_cancelled_job_never_comes_back(
    request: pytest.FixtureRequest, cluster: Cluster, plain: Cluster, tmp_path: Path, name: str, phase: str
) -> None:
    """With accounting and without."""
    here: Cluster = request.getfixturevalue(name)
    begin = ["+cluster.extra.begin=now+1hour"] if phase == "pending" else []
    case = [*SLOW, *ONE_NODE, "train.steps=600", "launch.detach=true", *begin]
    left = here.hpc_train(*case, "run.name=run", "-m", cwd=tmp_path)
    assert left.returncode == 0, left.stdout + left.stderr
    run = tmp_path / "outputs" / "run"
    job = wait_for_submission(run)
    if phase != "pending":
        wait_for_step(run, 2)
    if phase in ("saving", "requeued"):
        here.call("scancel", "--signal=USR2", job)
    if phase == "requeued":
        here.wait_for_state(job, "PENDING")
    here.call("scancel", job)
    here.wait_for_state(job, "CANCELLED")
    time.sleep(6)  # cred_expire: a job that was requeued would be back by then
    assert here.state(job) == "CANCELLED"
    assert len(events(run, "started")) == (0 if phase == "pending" else 1)
    waited = here.hpc_train("wait", "run", "--json", cwd=tmp_path)
    assert waited.returncode != 0
    assert "cancelled" in waited.stdout
