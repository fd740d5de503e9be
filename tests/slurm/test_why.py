"""``why``: of a job that waits for nodes, and of one that failed, on a real cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import Cluster, wait_for
from tests.slurm.runs import FAULTY, ONE_NODE, job_id


def why(cluster: Cluster, cwd: Path) -> dict[str, Any]:
    done = cluster.hpc_train("why", "run", "--json", cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.beside
def test_a_job_that_waits_for_nodes(quiet: Cluster, tmp_path: Path) -> None:
    busy = quiet.call("sbatch", "--parsable", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 600")
    other = busy.stdout.strip()
    try:
        quiet.wait_for_state(other, "RUNNING")
        case = ["cluster.nodes=2", "cluster.cpu_workers=1", "launch.detach=true", "run.name=run"]
        submitted = quiet.hpc_train(*FAULTY, *case, "-m", cwd=tmp_path)
        assert submitted.returncode == 0, submitted.stdout + submitted.stderr
        wait_for("a reason", lambda: why(quiet, tmp_path)["waiting"]["reason"] in ("Resources", "Priority"), 90)
        fewer = "cluster.nodes=1-2: 1 of the "
        wait_for(fewer, lambda: any(one.startswith(fewer) for one in why(quiet, tmp_path)["waiting"]["sooner"]), 200)
        found = why(quiet, tmp_path)
        assert "nodes" in found["waiting"]["words"]
        assert found["ledger"]["queue_s"] > 0
        held = quiet.call("scontrol", "uhold", job_id(tmp_path / "outputs" / "run"))
        assert held.returncode == 0, held.stderr
        waiting = why(quiet, tmp_path)["waiting"]
        assert waiting["reason"] == "JobHeldUser"
        assert waiting["fix"] == f"scontrol release {job_id(tmp_path / 'outputs' / 'run')}"
    finally:
        quiet.call("scancel", other)
        quiet.call("scancel", "--name=hpc_train-run")


@pytest.mark.beside
def test_a_job_that_failed(cluster: Cluster, tmp_path: Path) -> None:
    failed = cluster.hpc_train(*FAULTY, *ONE_NODE, "run.name=run", "-m", cwd=tmp_path, timeout=300)
    assert failed.returncode == 1, failed.stdout + failed.stderr
    cluster.wait_for_state(job_id(tmp_path / "outputs" / "run"), "FAILED")
    found = why(cluster, tmp_path)
    assert (found["cause"]["kind"], found["cause"]["rank"]) == ("user_error", 1)
    assert "ArithmeticError" in found["cause"]["traceback"]
    assert (found["slurm"]["state"], found["slurm"]["exit_code"]) == ("FAILED", "1:0")
    assert [node["state"].rstrip("*") for node in found["slurm"]["nodes"]]
    assert found["advice"][0].startswith("fix the error shown in the traceback")
    reported = cluster.hpc_train("why", "run", cwd=tmp_path).stdout
    assert "job " + job_id(tmp_path / "outputs" / "run") in reported
