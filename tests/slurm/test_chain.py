"""``launch.chain`` on a real cluster: jobs that Slurm may not requeue, one after the other as one run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_train.run.directory import RunDirectory
from tests.slurm.cluster import Cluster
from tests.slurm.runs import FAULTY, ONE_NODE, SLOW, detail, events, every_step, wait_for_step, wait_for_submission


def chain(run: Path) -> list[str]:
    wait_for_submission(run)
    return list(RunDirectory(run).record()["submissions"][-1]["chain"])


def states(cluster: Cluster, ids: list[str]) -> list[str]:
    ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    return [cluster.wait_for_state(job_id, *ended) for job_id in ids]


@pytest.mark.beside
def test_a_run_that_needs_two_of_three_jobs_cancels_the_third(cluster: Cluster, tmp_path: Path) -> None:
    process = cluster.start(*SLOW, *ONE_NODE, "train.steps=50", "launch.chain=3", "run.name=run", "-m", cwd=tmp_path)
    run = tmp_path / "outputs" / "run"
    wait_for_step(run, 3)
    ids = chain(run)
    assert detail(cluster, ids[0], "Requeue") == "0"
    cluster.call("scancel", "--signal=USR2", ids[0])  # what Slurm sends ahead of the time limit
    status = cluster.hpc_train("status", "run", "--json", cwd=tmp_path)
    assert json.loads(status.stdout)["part"].endswith(" of 3"), status.stdout
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert every_step(run) == list(range(1, 51)), "each step was taken once"
    assert states(cluster, ids) == ["FAILED", "COMPLETED", "CANCELLED"]
    assert [event["job_id"] for event in events(run, "started")] == ids[:2]


@pytest.mark.beside
@pytest.mark.long_form(25)  # tests/launch/test_slurm.py
def test_a_failure_ends_the_chain(cluster: Cluster, tmp_path: Path) -> None:
    done = cluster.hpc_train(*FAULTY, *ONE_NODE, "launch.chain=2", "run.name=run", "-m", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    run = tmp_path / "outputs" / "run"
    ids = chain(run)
    assert states(cluster, ids) == ["FAILED", "CANCELLED"]
    assert {event["job_id"] for event in events(run, "started")} == {ids[0]}


@pytest.mark.beside
@pytest.mark.long_form(25)  # tests/launch/test_slurm.py
def test_scancel_of_one_job_ends_the_chain(cluster: Cluster, tmp_path: Path) -> None:
    case = [*SLOW, *ONE_NODE, "train.steps=600", "launch.chain=3", "launch.detach=true"]
    assert cluster.hpc_train(*case, "run.name=run", "-m", cwd=tmp_path).returncode == 0
    run = tmp_path / "outputs" / "run"
    wait_for_step(run, 2)
    ids = chain(run)
    cluster.call("scancel", ids[0])
    assert states(cluster, ids) == ["CANCELLED"] * 3
    assert {event["job_id"] for event in events(run, "started")} == {ids[0]}
