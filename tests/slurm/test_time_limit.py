"""A run that is longer than its time limit: Slurm tells it ahead of the limit, and it goes on in its next job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.runs import ONE_NODE, SLOW, detail, events, every_step, job_id, wandb_ids

STEPS = 400  # of 0.4 s: more than fit into three minutes less start and save; few are left for the second job


@pytest.mark.beside
def test_the_time_limit_loses_no_step_and_keeps_the_wandb_run(plain: Cluster, tmp_path: Path) -> None:
    slow = [*SLOW, "+model.args.seconds=0.4", f"train.steps={STEPS}", "telemetry.wandb.mode=offline"]
    case = [*slow, *ONE_NODE, "cluster.time=00:03:00", "elastic.stop_grace_s=40"]
    done = plain.hpc_train(*case, "run.name=run", "-m", cwd=tmp_path, timeout=800)
    run = tmp_path / "outputs" / "run"
    assert done.returncode == 0, done.stdout + done.stderr
    assert every_step(run) == list(range(1, STEPS + 1)), "each step was taken once"
    requeued = events(run, "requeued")
    assert len(requeued) >= 1
    assert len(set(wandb_ids(run))) == 1
    assert detail(plain, job_id(run), "Restarts") == str(len(requeued))
