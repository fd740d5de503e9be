"""A real Prometheus sees a run on the cluster as one series over a killed worker, a requeue and a resume."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest

from hpc_train.run.directory import RunDirectory
from tests.checkpoint.progress import IN_LONG_FORM
from tests.faults.on_slurm import worker
from tests.report.monitored import NEEDED, scraping
from tests.slurm.cluster import Cluster, wait_for
from tests.slurm.runs import SLOW, events, job_id, steps, wait_for_step


@pytest.mark.timeout(1800)
@IN_LONG_FORM  # tests/report/test_dashboards.py has the same without a cluster; this takes one to two minutes
@NEEDED
def test_prometheus_sees_one_series_over_a_kill_a_requeue_and_a_resume(plain: Cluster, tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "run"
    token = tmp_path / ".config" / "hpc_train" / "prometheus.token"
    with scraping(tmp_path, home=tmp_path) as prometheus:
        case = [
            *SLOW,
            "cluster.nodes=2",
            "cluster.cpu_workers=1",
            "checkpoint.every=5",
            "elastic.max_requeues=3",
            "run.name=run",
        ]
        case += ["telemetry.prometheus.port=auto", f"telemetry.prometheus.targets_dir={prometheus.targets}"]
        case += [f"telemetry.prometheus.token_file={token}", "telemetry.prometheus.interval_s=0.5"]
        process = plain.start(*case, "train.steps=4000", "-m", cwd=tmp_path)
        wait_for_step(run, 7, 600)
        worker(plain, "n2").kill()
        wait_for("the restart", lambda: bool(events(run, "restarted")), 600)
        wait_for("the restart in Prometheus", lambda: prometheus.value("hpc_train_restarts_total") == 1, 300)
        wait_for("the alert", lambda: "HpcTrainRestarted" in prometheus.firing(), 300)
        before, first_job = max(steps(run)), job_id(run)
        plain.call("scancel", "--signal=USR2", first_job)
        wait_for("the requeue", lambda: len(events(run, "started")) == 3, 600)
        wait_for_step(run, before + 10, 600)
        wait_for("the requeue in Prometheus", lambda: prometheus.value("hpc_train_requeues_total") == 1, 300)
        assert len(list(prometheus.targets.glob("*.json"))) == 1
        plain.call("scancel", "--signal=USR1", first_job)
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 75, output
        assert list(prometheus.targets.iterdir()) == [], "a run that does not run is no target"
        assert RunDirectory(run).record()["prometheus"] is None
        stopped_at = max(steps(run))
        plain.wait_for_state(first_job, "FAILED", "COMPLETED", seconds=600)
        # resumes in another job, long enough for some scrapes
        done = plain.hpc_train(*case, f"train.steps={stopped_at + 25}", "-m", cwd=tmp_path, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        assert job_id(run) != first_job
        assert len(prometheus.series("hpc_train_step")) == 1, "one series"
        assert {series["job_id"] for series in prometheus.series("hpc_train_run_info")} == {first_job, job_id(run)}
        (seen,) = prometheus.ask(
            "query_range", query="hpc_train_step", start=time.time() - 3600, end=time.time(), step="1s"
        )["result"]
        values = [float(value) for _, value in seen["values"]]
        assert values[0] < before < stopped_at < values[-1]
        assert sum(later < earlier for earlier, later in pairwise(values)) <= 3
        counters = [
            prometheus.value(f"max_over_time(hpc_train_{name}[1h])") for name in ("restarts_total", "requeues_total")
        ]
        assert counters == [1, 1]
        resets = [
            prometheus.value(f"resets(hpc_train_{name}[1h])") for name in ("restarts_total", "checkpoint_saves_total")
        ]
        assert resets == [0, 0], "no counter has started again"
