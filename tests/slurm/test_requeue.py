"""Preempted and signalled jobs are requeued and continue, unless they must not be requeued."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.checkpoint.progress import IN_LONG_FORM
from tests.slurm.cluster import Cluster, wait_for
from tests.slurm.runs import ONE_NODE, SLOW, detail, events, every_step, job_id, status, wait_for_step


@pytest.mark.beside
def test_one_task_of_an_array_is_requeued_alone(plain: Cluster, tmp_path: Path) -> None:
    case = [*SLOW, *ONE_NODE, "train.steps=30", "optim.lr=1e-3,3e-4"]
    process = plain.start(*case, "run.name=sweep", "-m", cwd=tmp_path)
    other, asked = (tmp_path / "outputs" / "sweep" / str(number) for number in range(2))
    wait_for_step(asked, 3)
    assert job_id(asked).endswith("_1")
    plain.call("scancel", "--signal=USR2", job_id(asked))
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert every_step(asked) == every_step(other) == list(range(1, 31))
    assert len(events(asked, "started")) == 2
    assert len(events(other, "started")) == 1


@IN_LONG_FORM  # tests/doors has a restart that finds them gone
@pytest.mark.beside
def test_a_requeued_job_that_finds_its_checkpoints_gone_is_refused(plain: Cluster, tmp_path: Path) -> None:
    process = plain.start(*SLOW, *ONE_NODE, "train.steps=600", "run.name=run", "-m", cwd=tmp_path)
    run = tmp_path / "outputs" / "run"
    wait_for_step(run, 2)
    plain.call("scancel", "--signal=USR2", job_id(run))
    wait_for("the requeue", lambda: bool(events(run, "requeued")), 120)
    before = every_step(run)
    shutil.rmtree(run / "checkpoints")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 2, output
    assert f"this run had saved a checkpoint of step {before[-1]}, but none of its checkpoints is left" in output
    assert every_step(run) == before, "nothing was trained again"
    plain.wait_for_state(job_id(run), "FAILED")
    assert detail(plain, job_id(run), "ExitCode") == "2:0"


@pytest.mark.beside
@pytest.mark.long_form(20)  # tests/elastic/test_requeue.py
def test_a_job_that_may_not_be_requeued_is_given_up(plain: Cluster, tmp_path: Path) -> None:
    case = [*SLOW, *ONE_NODE, "train.steps=600", "elastic.max_requeues=0"]
    process = plain.start(*case, "run.name=run", "-m", cwd=tmp_path)
    run = tmp_path / "outputs" / "run"
    wait_for_step(run, 2)
    plain.call("scancel", "--signal=USR2", job_id(run))
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 93, output
    assert "elastic.max_requeues" in output
    plain.wait_for_state(job_id(run), "FAILED")
    assert detail(plain, job_id(run), "ExitCode") == "93:0"


@pytest.mark.beside
@pytest.mark.long_form(20)  # tests/elastic/test_requeue.py
def test_a_job_that_somebody_holds_is_not_requeued(plain: Cluster, tmp_path: Path) -> None:
    """``status`` has Slurm's states: held, suspended, pending again. A job that is held while running stays so."""
    case = [*SLOW, *ONE_NODE, "train.steps=600", "launch.detach=true", "+cluster.extra.hold=true"]
    left = plain.hpc_train(*case, "run.name=run", "-m", cwd=tmp_path)
    assert left.returncode == 0, left.stdout + left.stderr
    run = tmp_path / "outputs" / "run"
    assert status(plain, tmp_path, "run")[0]["state"] == "held (JobHeldUser)"
    plain.call("scontrol", "release", job_id(run))
    wait_for_step(run, 2)
    plain.call("scontrol", "suspend", job_id(run))
    assert status(plain, tmp_path, "run")[0]["state"] == "suspended"
    plain.call("scontrol", "resume", job_id(run))
    plain.call("scontrol", "requeue", job_id(run))
    plain.wait_for_state(job_id(run), "PENDING")
    assert status(plain, tmp_path, "run")[0]["state"].startswith("pending")
    second = run / "metrics" / "attempt-001.jsonl"
    wait_for("a step of the second start", lambda: second.exists() and bool(second.read_text()), 120)
    plain.call("scontrol", "hold", job_id(run))
    plain.call("scancel", "--signal=USR2", job_id(run))
    assert plain.wait_for_state(job_id(run), "FAILED", "PENDING") == "FAILED"
    assert detail(plain, job_id(run), "ExitCode") == "75:0"
    assert detail(plain, job_id(run), "Restarts") == "1"
    assert plain.hpc_train("wait", "run", cwd=tmp_path).returncode == 75
