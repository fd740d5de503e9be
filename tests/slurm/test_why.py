"""``why``: of a job that waits for nodes, of killed steps, and of a job that failed, on a real cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.progress import IN_LONG_FORM
from tests.slurm.cluster import Cluster, wait_for
from tests.slurm.runs import FAULTY, ONE_NODE, events, job_id, why

GROWS = "import time; held = b'x' * (500 << 20); time.sleep(600)"


@pytest.mark.beside
def test_a_job_that_waits_for_nodes(contended: Cluster, tmp_path: Path) -> None:
    busy = contended.call("sbatch", "--parsable", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 600")
    other = busy.stdout.strip()
    try:
        contended.wait_for_state(other, "RUNNING")
        case = ["cluster.nodes=2", "cluster.cpu_workers=1", "launch.detach=true", "run.name=run"]
        submitted = contended.hpc_train(*FAULTY, *case, "-m", cwd=tmp_path)
        assert submitted.returncode == 0, submitted.stdout + submitted.stderr
        wait_for("a reason", lambda: why(contended, tmp_path)["waiting"]["reason"] in ("Resources", "Priority"), 90)
        fewer = "cluster.nodes=1-2: 1 of the "
        wait_for(
            fewer, lambda: any(one.startswith(fewer) for one in why(contended, tmp_path)["waiting"]["sooner"]), 200
        )
        found = why(contended, tmp_path)
        assert "nodes" in found["waiting"]["words"]
        assert found["ledger"]["queue_s"] > 0
        held = contended.call("scontrol", "uhold", job_id(tmp_path / "outputs" / "run"))
        assert held.returncode == 0, held.stderr
        waiting = why(contended, tmp_path)["waiting"]
        assert waiting["reason"] == "JobHeldUser"
        assert waiting["fix"] == f"scontrol release {job_id(tmp_path / 'outputs' / 'run')}"
    finally:
        contended.call("scancel", other)
        contended.call("scancel", "--name=hpc_train-run")


def submit_command(cluster: Cluster, cwd: Path, command: str, *arguments: str) -> str:
    """Submits one process that is no trainer, and returns the id of the job."""
    case = ["+strategy=dp", "cluster=slurm", "cluster.nodes=1", "cluster.cpu_workers=1", f"run.command={command}"]
    submitted = cluster.hpc_train(*case, *arguments, "launch.detach=true", "run.name=run", "-m", cwd=cwd)
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    return job_id(cwd / "outputs" / "run")


@IN_LONG_FORM
def test_steps_that_slurm_kills_for_memory(limited: Cluster, tmp_path: Path) -> None:
    (tmp_path / "grows.py").write_text(GROWS)
    job = submit_command(limited, tmp_path, "[python,grows.py]", "cluster.mem=400M")
    run = tmp_path / "outputs" / "run"
    assert limited.wait_for_state(job, "FAILED", "OUT_OF_MEMORY", "COMPLETED", "CANCELLED") == "FAILED"
    assert len(events(run, "started")) == 2, "the third step was refused"
    found = why(limited, tmp_path)
    assert (found["exit_code"], found["cause"]["kind"]) == (2, "out_of_memory")
    assert f"StepId={job}.1 exceeded memory limit" in found["cause"]["message"]
    assert "cluster.mem=600M instead of 400M" in found["cause"]["message"]
    assert found["advice"][0] == "set the larger cluster.mem that the message names"
    assert [event["event"] for event in found["done"]] == ["agents_killed", "failed"]


@IN_LONG_FORM
def test_a_process_that_the_kernel_kills_for_the_memory_of_its_job(limited: Cluster, tmp_path: Path) -> None:
    if not Path(limited.environment["SLURM_CONF"]).parent.with_name("etc-gpu").exists():
        pytest.skip("the control groups of this machine cannot limit the memory of a job")
    (tmp_path / "grows.py").write_text(GROWS)
    on_gpu_node = ["cluster.partition=gpu", "cluster.gpus_per_node=0"]  # nodes without GPUs have no control groups
    job = submit_command(limited, tmp_path, "[python,grows.py]", "cluster.mem=400M", *on_gpu_node)
    ended = limited.wait_for_state(job, "FAILED", "OUT_OF_MEMORY", "COMPLETED", "CANCELLED")
    assert ended in ("FAILED", "OUT_OF_MEMORY")
    found = why(limited, tmp_path)
    assert (found["cause"]["kind"], found["cause"]["rank"]) == ("out_of_memory", 0)
    assert "killed by SIGKILL: out of host memory according to the kernel" in found["cause"]["message"]
    assert found["advice"][0].startswith("set cluster.mem=600M instead of 400M")


@IN_LONG_FORM
def test_a_step_that_a_signal_kills_and_a_job_that_slurm_does_not_requeue(limited: Cluster, tmp_path: Path) -> None:
    job = submit_command(limited, tmp_path, '[sleep,"600"]', "cluster.mem=2G")
    run = tmp_path / "outputs" / "run"
    wait_for("the first step", lambda: bool(events(run, "started")), 120)
    limited.call("scancel", "--signal=KILL", f"{job}.0")
    wait_for("the second step", lambda: bool(events(run, "agents_killed")), 120)
    found = why(limited, tmp_path)
    assert (found["exit_code"], found["cause"]["kind"], found["cause"]["attempt"]) == (None, "killed", 0)
    assert f"a signal killed all agents of step {job}.0 (scancel --signal=KILL" in found["cause"]["message"]
    limited.call("scontrol", "update", f"JobId={job}", "Requeue=0")
    limited.call("scancel", "--signal=USR2", job)  # as Slurm does before the time limit
    assert limited.wait_for_state(job, "FAILED", "COMPLETED", "PENDING") == "FAILED"
    found = why(limited, tmp_path)
    assert (found["exit_code"], found["cause"]["kind"], found["cause"]["attempt"]) == (93, "stopped_retrying", 1)
    assert f"not requeued: Slurm may not requeue job {job} (Requeue=0)" in found["cause"]["message"]


@pytest.mark.beside
@pytest.mark.long_form(20)  # tests/runs/test_diagnosis.py
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
