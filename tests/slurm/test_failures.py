"""Jobs that fail or cannot start: how they end in Slurm, what reaches the console, and what ``why`` says."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from tests.checkpoint.tensors import assert_same_bits
from tests.doors.command import REPOSITORY
from tests.slurm.cluster import Cluster, wait_for
from tests.slurm.runs import FAULTY, SLOW, TWO_BY_TWO, detail, events, job_id, losses, why, with_python

GROWS = "import time; held = b'x' * (500 << 20); time.sleep(600)"


@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("kill", 93)])
@pytest.mark.long_form(40)  # tests/elastic/test_agent.py, tests/runs/test_diagnosis.py
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
    late_s = time.time() - events(run, "worker_failed")[-1]["time"]
    assert late_s < 15, f"the console heard of it {late_s:.0f} s late"
    assert len(events(run, "worker_failed")) == (2 if how == "raise" else 4)
    assert cluster.wait_for_state(job_id(run), "FAILED", "COMPLETED", "CANCELLED") == "FAILED"
    assert detail(cluster, job_id(run), "ExitCode") == f"{code}:0"
    left = [process.info for process in psutil.process_iter(["cmdline"]) if str(run) in (process.info["cmdline"] or [])]
    assert not left
    if how == "raise":
        report = why(cluster, tmp_path)
        assert (report["cause"]["kind"], report["cause"]["rank"]) == ("user_error", 3)
        assert "ArithmeticError" in report["cause"]["traceback"]
        assert (report["slurm"]["state"], report["slurm"]["exit_code"]) == ("FAILED", "1:0")
        assert [node["state"].rstrip("*") for node in report["slurm"]["nodes"]]
        assert report["advice"][0].startswith("fix the error shown in the traceback")
        assert f"job {job_id(run)}" in cluster.hpc_train("why", "run", cwd=tmp_path).stdout


@pytest.mark.long_form(60)  # tests/faults/test_elsewhere.py
@pytest.mark.timeout(900)
def test_a_node_that_computes_wrong_numbers_is_left_behind(cluster: Cluster, tmp_path: Path) -> None:
    """It errs once, which is corrected, and later always: Slurm starts the job again on other nodes."""
    asked = [
        *FAULTY, "model._target_=tests.doors.faulty.Erring", "cluster.nodes=3", "cluster.cpu_workers=1",
        "batch.global_size=12", "train.steps=16", "train.verify.every=1", "checkpoint.every=2",
        "strategy.data_parallel=allreduce",
    ]  # fmt: skip
    for name, node in (("whole", "none"), ("run", "n2")):
        done = cluster.hpc_train(*asked, f"+model.args.node={node}", f"run.name={name}", "-m", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    run, whole = (tmp_path / "outputs" / name for name in ("run", "whole"))
    assert events(whole, "corruption") == []
    first, *later = events(run, "corruption")
    assert (first["node"], first["steps"], first["final"]) == ("n2", 1, False)
    assert {event["node"] for event in later} == {"n2"} and later[-1]["final"]
    assert [event["nodes"] for event in events(run, "started")] == [["n1", "n2", "n3"], ["n1", "n3", "n4"]]
    assert [event["exclude"] for event in events(run, "requeued")] == [["n2"]]
    assert detail(cluster, job_id(run), "Restarts") == "1"
    assert losses(run) == losses(whole)
    last = Path("checkpoints", "step-00000016")
    assert_same_bits(run / last, whole / last)
    assert [excluded["node"] for excluded in why(cluster, tmp_path)["excluded_nodes"]] == ["n2"]


@pytest.mark.long_form(25)  # tests/elastic/test_agent.py
def test_gpus_that_no_node_can_use_refuse_the_job(cluster: Cluster, tmp_path: Path) -> None:
    """Slurm allocates GPUs that only it knows of, to jobs that ``-m`` submits and to those of the batch scripts."""
    options = ["--parsable", "--partition=mixed", "--nodelist=n7", "--gpus-per-node=2", "--output=job.log"]
    by_hand = [*options, str(REPOSITORY / "slurm" / "single_node.sbatch"), *SLOW, "run.name=by_hand"]
    script = with_python(cluster).call("sbatch", *by_hand, cwd=tmp_path).stdout.strip()
    asked = [*SLOW, "cluster.partition=gpu", "cluster.nodes=2", "cluster.gpus_per_node=2", "run.name=run"]
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


@pytest.mark.long_form(45)  # tests/runs/test_diagnosis.py
def test_a_job_that_waits_for_nodes(plain: Cluster, tmp_path: Path) -> None:
    busy = plain.call("sbatch", "--parsable", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 600")
    other = busy.stdout.strip()
    try:
        plain.wait_for_state(other, "RUNNING")
        case = ["cluster.nodes=2", "cluster.cpu_workers=1", "launch.detach=true", "run.name=run"]
        submitted = plain.hpc_train(*FAULTY, *case, "-m", cwd=tmp_path)
        assert submitted.returncode == 0, submitted.stdout + submitted.stderr
        wait_for("a reason", lambda: why(plain, tmp_path)["waiting"]["reason"] in ("Resources", "Priority"), 90)
        fewer = "cluster.nodes=1-2: 1 of the "
        wait_for(fewer, lambda: any(one.startswith(fewer) for one in why(plain, tmp_path)["waiting"]["sooner"]), 200)
        found = why(plain, tmp_path)
        assert "nodes" in found["waiting"]["words"]
        assert any("cluster.nodes=1: Slurm expects a start" in line for line in found["waiting"]["sooner"])
        assert found["ledger"]["queue_s"] > 0
        held = plain.call("scontrol", "uhold", job_id(tmp_path / "outputs" / "run"))
        assert held.returncode == 0, held.stderr
        waiting = why(plain, tmp_path)["waiting"]
        assert waiting["reason"] == "JobHeldUser"
        assert waiting["fix"] == f"scontrol release {job_id(tmp_path / 'outputs' / 'run')}"
    finally:
        plain.call("scancel", other)
        plain.call("scancel", "--name=run")


def submit_command(cluster: Cluster, cwd: Path, command: str, *arguments: str) -> str:
    """Submits one process that is no trainer, and returns the id of the job."""
    case = ["+strategy=dp", "cluster=slurm", "cluster.nodes=1", "cluster.cpu_workers=1", f"run.command={command}"]
    submitted = cluster.hpc_train(*case, *arguments, "launch.detach=true", "run.name=run", "-m", cwd=cwd)
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    return job_id(cwd / "outputs" / "run")


@pytest.mark.long_form(35)  # tests/elastic/test_requeue.py, tests/runs/test_diagnosis.py
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


@pytest.mark.long_form(30)  # tests/elastic/test_requeue.py, tests/runs/test_diagnosis.py
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


@pytest.mark.long_form(45)  # tests/elastic/test_requeue.py, tests/runs/test_diagnosis.py
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
