"""A failure on any node ends the job everywhere, is FAILED in Slurm, and reaches the console with its own traceback."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from tests.checkpoint.progress import IN_LONG_FORM
from tests.doors.command import REPOSITORY
from tests.slurm.cluster import Cluster
from tests.slurm.runs import (
    FAULTY,
    ONE_NODE,
    SLOW,
    TWO_BY_TWO,
    detail,
    events,
    job_id,
    wait_for_step,
    with_python,
)


@pytest.mark.parametrize(("how", "code"), [("raise", 1), pytest.param("kill", 93, marks=IN_LONG_FORM)])
def test_a_failing_rank_of_the_second_node(cluster: Cluster, tmp_path: Path, how: str, code: int) -> None:
    """It fails at the third step of every attempt, before anything was saved; only a kill is worth three more."""
    faulty = [*FAULTY, *TWO_BY_TWO, "+model.args.rank=3", f"+model.args.how={how}"]
    done = cluster.hpc_train(*faulty, "run.name=run", "-m", cwd=tmp_path)
    run = tmp_path / "outputs" / "run"
    assert done.returncode == code, done.stdout + done.stderr
    assert "rank 3 on n" in done.stderr
    if how == "raise":
        assert "ArithmeticError: the model of the test fails on purpose" in done.stderr
        assert "Connection closed by peer" not in done.stderr
    told_s = time.time() - events(run, "worker_failed")[-1]["time"]
    assert told_s < 15, f"the console heard of it {told_s:.0f} s late"
    assert len(events(run, "worker_failed")) == (2 if how == "raise" else 4)
    assert cluster.wait_for_state(job_id(run), "FAILED", "COMPLETED", "CANCELLED") == "FAILED"
    assert detail(cluster, job_id(run), "ExitCode") == f"{code}:0"
    left = [process.info for process in psutil.process_iter(["cmdline"]) if str(run) in (process.info["cmdline"] or [])]
    assert not left


@pytest.mark.parametrize("nodes", [pytest.param(1, marks=IN_LONG_FORM), 2])
@pytest.mark.long_form(25)  # tests/elastic/test_agent.py
def test_gpus_that_no_node_can_use_refuse_the_job(cluster: Cluster, tmp_path: Path, nodes: int) -> None:
    """Slurm allocates GPUs that only it knows of, to jobs that ``-m`` submits and to those of the batch scripts."""
    options = ["--parsable", "--partition=mixed", "--nodelist=n7", "--gpus-per-node=2", "--output=job.log"]
    by_hand = [*options, str(REPOSITORY / "slurm" / "single_node.sbatch"), *SLOW, "run.name=by_hand"]
    script = with_python(cluster).call("sbatch", *by_hand, cwd=tmp_path).stdout.strip()
    asked = [*SLOW, "cluster.partition=gpu", f"cluster.nodes={nodes}", "cluster.gpus_per_node=2", "run.name=run"]
    done = cluster.hpc_train(*asked, "-m", cwd=tmp_path)
    run = tmp_path / "outputs" / "run"
    assert done.returncode == 2, done.stdout + done.stderr
    assert "cannot use " in done.stderr and " GPUs: 2 GPUs per node are requested, and the process " in done.stderr
    assert "cluster.gpus_per_node=0 trains on the CPU" in done.stderr
    assert events(run, "started", "requeued") == []
    assert cluster.wait_for_state(script, "FAILED", "COMPLETED") == "FAILED"
    assert "node n7 cannot use its GPUs: 2 are allocated to the step" in (tmp_path / "job.log").read_text()
    assert events(tmp_path / "outputs" / "by_hand", "started") == []
    for job in (job_id(run), script):
        cluster.wait_for_state(job, "FAILED")
        assert detail(cluster, job, "ExitCode") == "2:0"


@pytest.mark.beside
@pytest.mark.long_form(25)  # test_cancel.py
def test_a_job_that_is_stopped_by_a_person_is_not_requeued(cluster: Cluster, tmp_path: Path) -> None:
    process = cluster.start(*SLOW, *ONE_NODE, "train.steps=600", "run.name=run", "-m", cwd=tmp_path)
    run = tmp_path / "outputs" / "run"
    wait_for_step(run, 2)
    cluster.call("scancel", "--signal=USR1", job_id(run))
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 75, output
    assert "run.name=run" in output, "how to go on"
    assert cluster.wait_for_state(job_id(run), "FAILED") == "FAILED"
    assert detail(cluster, job_id(run), "ExitCode") == "75:0"
    assert detail(cluster, job_id(run), "Restarts") == "0"
