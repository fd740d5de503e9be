"""A run that is longer than its time limit: Slurm tells it ahead of the limit, and it goes on in its next job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.progress import IN_LONG_FORM
from tests.doors.command import REPOSITORY
from tests.slurm.cluster import Cluster
from tests.slurm.runs import ONE_NODE, SLOW, detail, events, every_step, job_id, wandb_ids, why, with_python

STEPS = 400  # of 0.4 s: more than fit into three minutes less start and save; few are left for the second job


@pytest.mark.beside
def test_the_time_limit_loses_no_step_and_keeps_the_wandb_run(plain: Cluster, tmp_path: Path) -> None:
    slow = [*SLOW, "+model.args.seconds=0.4", f"train.steps={STEPS}", "telemetry.wandb.mode=offline"]
    case = [*slow, *ONE_NODE, "cluster.time=00:03:00", "elastic.stop_grace_s=40"]
    directory = tmp_path / "50%x runs"  # of which Slurm would replace a part in the path of the output
    directory.mkdir()
    done = plain.hpc_train(*case, "run.name=run", "-m", cwd=directory, timeout=800)
    run = directory / "outputs" / "run"
    assert done.returncode == 0, done.stdout + done.stderr
    assert every_step(run) == list(range(1, STEPS + 1)), "each step was taken once"
    requeued = events(run, "requeued")
    assert len(requeued) >= 1
    assert len(set(wandb_ids(run))) == 1
    assert detail(plain, job_id(run), "Restarts") == str(len(requeued))


@IN_LONG_FORM
def test_the_time_limit_of_jobs_that_are_not_requeued(plain: Cluster, tmp_path: Path) -> None:
    """One may not be requeued, a step of the next takes longer than the grace, and Slurm does not tell the third."""
    shell = with_python(plain)
    short = [*ONE_NODE, "cluster.time=1", "elastic.stop_grace_s=10", "launch.detach=true", "train.steps=9000", "-m"]
    long_step = ["+model.args.seconds=100", "elastic.hang_timeout_s=0"]
    for more in (["run.name=once", "elastic.max_requeues=0"], ["run.name=late", "elastic.max_requeues=0", *long_step]):
        done = shell.hpc_train(*SLOW, *short, *more, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    script = [str(REPOSITORY / "slurm" / "single_node.sbatch"), *SLOW, "cluster.cpu_workers=1", "train.steps=9000"]
    options = ["--parsable", "--time=1", "--signal=URG@10", "--output=job.log"]
    untold = shell.call("sbatch", *options, *script, "run.name=untold", cwd=tmp_path).stdout.strip()
    assert shell.wait_for_state(untold, "TIMEOUT", "FAILED", "COMPLETED", "CANCELLED") == "TIMEOUT"
    found = {name: why(shell, tmp_path, name) for name in ("once", "late", "untold")}
    announced = "Slurm announced the time limit or a preemption (USR2); not requeued: elastic.max_requeues=0"
    assert found["once"]["cause"]["message"].startswith(announced)
    assert (found["once"]["exit_code"], found["once"]["checkpoint"]["lost_steps"]) == (93, 0)
    assert found["late"]["cause"]["message"] == "did not stop within 10 s of the request (elastic.stop_grace_s)"
    assert "increase elastic.stop_grace_s" in found["late"]["advice"][0]
    assert found["untold"]["slurm"]["state"] == "TIMEOUT"
    assert "it did not stop before its time limit: increase cluster.time" in found["untold"]["advice"][0]
