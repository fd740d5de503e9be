"""MLflow and W&B show a run on the cluster as one run with each step once, over a kill, a requeue and a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.run.directory import RunDirectory
from tests.checkpoint.progress import IN_LONG_FORM
from tests.faults.on_slurm import worker
from tests.slurm.cluster import Cluster, wait_for
from tests.slurm.runs import SLOW, events, job_id, steps, wait_for_step
from tests.telemetry import wandb_service
from tests.telemetry.test_mlflow import real_server


@pytest.mark.timeout(1800)
@IN_LONG_FORM  # tests/telemetry has the same without a cluster; this takes one to two minutes
def test_trackers_show_one_run_over_a_kill_a_requeue_and_a_resume(plain: Cluster, tmp_path: Path) -> None:
    """MLflow's server is a real one with SQLite; the client of W&B is real and its service a stand-in."""
    run = tmp_path / "outputs" / "run"
    with real_server(tmp_path) as mlflow, wandb_service.service() as wandb:
        account = {"WANDB_BASE_URL": wandb.url, "WANDB_API_KEY": "0" * 40}
        cluster = replace(plain, environment=plain.environment | account)
        case = [*SLOW, "cluster.nodes=2", "cluster.cpu_workers=1", "checkpoint.every=5", "elastic.max_requeues=3"]
        case += ["run.name=run", "telemetry.wandb.mode=online", f"telemetry.mlflow.uri={mlflow}"]
        process = cluster.start(*case, "train.steps=4000", "-m", cwd=tmp_path)
        wait_for_step(run, 8, 600)
        wait_for("W&B", lambda: max(wandb.steps(), default=0) >= 8, 300)
        worker(cluster, "n2").kill()
        wait_for("the restart", lambda: bool(events(run, "restarted")), 600)
        before, first_job = max(steps(run)), job_id(run)
        cluster.call("scancel", "--signal=USR2", first_job)
        wait_for("the requeue", lambda: len(events(run, "started")) == 3, 600)
        wait_for_step(run, before + 10, 600)
        cluster.call("scancel", "--signal=USR1", first_job)
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 75, output
        stopped_at = max(steps(run))
        cluster.wait_for_state(first_job, "FAILED", "COMPLETED", seconds=600)
        done = cluster.hpc_train(*case, f"train.steps={stopped_at + 25}", "-m", cwd=tmp_path, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        assert job_id(run) != first_job
        all_steps = list(range(1, stopped_at + 26))
        assert wandb.steps() == all_steps
        assert logged_steps(mlflow, RunDirectory(run)) == all_steps
    found = RunDirectory(run).record()
    assert found["wandb"]["mode"] == "online" and "problem" not in found["wandb"] | found["mlflow"]
    repeated = [line["step"] for line in RunDirectory(run).read_all_metrics()]
    assert len(repeated) > len(set(repeated)), "steps were done again after the kill"


def logged_steps(url: str, run: RunDirectory) -> list[int]:
    """Returns the steps for which the server has a loss, in their order; it has one run, which is finished."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(url)
    (found,) = client.search_runs([client.get_experiment_by_name("hpc_train").experiment_id])
    assert found.info.status == "FINISHED" and found.data.tags["hpc_train.run_id"] == run.record()["run_id"]
    return sorted(one.step for one in client.get_metric_history(found.info.run_id, "loss"))
