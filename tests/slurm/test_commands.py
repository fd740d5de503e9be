"""The commands for runs that were submitted, the commands that submit jobs of their own, and those of the docs."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from hpc_train.planner.machine import read_machine
from hpc_train.run.directory import RunDirectory
from tests.checkpoint.made import commit
from tests.checkpoint.progress import LONG
from tests.doors.command import REPOSITORY, TINY, TINY_GPT, lines_of_pages
from tests.doors.recorded import recorded_run
from tests.slurm.cluster import Cluster, wait_for
from tests.slurm.runs import FAULTY, ONE_NODE, SLOW, events, every_step, job_id, steps, wait_for_step, with_python
from tests.telemetry import mlflow_service
from tests.telemetry.test_mlflow import real_server
from tests.train.runs import frozen

SUBMITTED = """
import json, sys, time
import hpc_train

run = hpc_train.submit(json.loads(sys.argv[1]))
while not run.metrics():
    time.sleep(0.5)
running = run.status()
cancelled = run.cancel(save=True)
ended = run.wait(timeout=200)
assert not {"torch", "wandb"} & set(sys.modules)
print(json.dumps([run.job_id, running.state, running.exit_code, cancelled, ended.exit_code, len(run.checkpoints())]))
"""


@pytest.mark.long_form(30)  # test_jobs.py does it with commands
def test_a_run_is_submitted_watched_and_cancelled_from_python(cluster: Cluster, tmp_path: Path) -> None:
    overrides = json.dumps([*SLOW, *ONE_NODE, "train.steps=10000", "run.name=run"])
    done = cluster.call(sys.executable, "-c", SUBMITTED, overrides, cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    job_id, *rest = json.loads(done.stdout)
    assert int(job_id) > 0
    assert rest == ["running", None, True, 75, 1]


@pytest.mark.long_form(30)  # test_jobs.py stops and resumes
def test_a_run_is_resumed_right_after_it_was_cancelled(cluster: Cluster, tmp_path: Path) -> None:
    """Though its job has not left yet, and the command that submitted it still waits in another terminal."""
    case = [*SLOW, *ONE_NODE, "train.steps=80", "checkpoint.every=5", "run.name=run", "-m"]
    waiting = cluster.start(*case, cwd=tmp_path)
    run = tmp_path / "outputs" / "run"
    wait_for_step(run, 7)
    first = job_id(run)
    assert cluster.hpc_train("cancel", "run", cwd=tmp_path).returncode == 0
    resumed = cluster.hpc_train("resume", "run", "--json", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert {"run": str(run), "state": "done", "exit_code": 0}.items() <= json.loads(resumed.stdout).items()
    assert job_id(run) != first
    assert cluster.state(first) == "CANCELLED"
    assert steps(run) == list(range(1, 81))
    waiting.communicate(timeout=120)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGHUP])
@pytest.mark.long_form(30)  # tests/launch/test_submission.py, tests/runs/test_logs.py
def test_who_leaves_a_waiting_submission_can_follow_the_job(
    cluster: Cluster, tmp_path: Path, how: signal.Signals
) -> None:
    process = cluster.start(*SLOW, *ONE_NODE, "train.steps=40", "run.name=run", "-m", cwd=tmp_path)
    run = tmp_path / "outputs" / "run"
    wait_for_step(run, 2)
    os.killpg(process.pid, how)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 130, output
    assert "hpc_train logs -f outputs/run" in output
    following = cluster.start("logs", "-f", "outputs/run", cwd=tmp_path)
    assert following.stdout is not None
    seen = next(line for line in following.stdout if "step 2/40" in line)
    assert 40 not in steps(run), "it is shown while the run is at work"
    rest, _ = following.communicate(timeout=240)
    assert following.returncode == 0, seen + rest
    assert "step 40/40" in rest
    waited = cluster.hpc_train("wait", "run", cwd=tmp_path)
    assert waited.returncode == 0, waited.stdout + waited.stderr
    assert every_step(run) == list(range(1, 41))


MODEL = """
from torch import nn


class Table(nn.Module):
    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 256)
        self.wrong = wrong

    def forward(self, inputs):
        if self.wrong and self.training:
            raise ValueError("the sign is wrong")
        return self.table(inputs)
"""


@pytest.mark.long_form(80)  # tests/runs/test_diagnosis.py, tests/doors
def test_the_failed_runs_of_a_sweep_are_tried_again(cluster: Cluster, tmp_path: Path) -> None:
    """First with the code as it was frozen, then with the corrected code."""
    model = tmp_path / "own_model.py"
    model.write_text(MODEL)
    (tmp_path / ".gitignore").write_text("outputs/\n")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    path = f"{tmp_path}{os.pathsep}{cluster.environment['PYTHONPATH']}"
    own = replace(cluster, environment=cluster.environment | {"PYTHONPATH": path})
    case = [*FAULTY, *ONE_NODE, "model._target_=own_model.Table", "+model.args.wrong=true,false", "run.name=sweep"]
    done = own.hpc_train(*case, "-m", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "python -m hpc_train retry --failed outputs/sweep --code now" in done.stdout
    failed, good = (tmp_path / "outputs" / "sweep" / str(number) for number in range(2))
    found = own.hpc_train("why", "sweep", cwd=tmp_path).stdout
    assert "user_error in 1 run: ValueError: the sign is wrong" in found, found
    assert "outputs/sweep/0" in found and "outputs/sweep/1" not in found, found
    log = own.hpc_train("logs", str(failed), cwd=tmp_path).stdout
    assert log.startswith("rank ") and "ValueError: the sign is wrong" in log, "the failing rank is on top"
    model.write_text(MODEL.replace("self.wrong and", "not self.wrong and"))
    retried = own.hpc_train("retry", "--failed", "sweep", cwd=tmp_path)
    assert retried.returncode == 1, "it fails again"
    assert "resubmitting 1 of 2 runs" in retried.stdout
    assert f"{tmp_path} has changed since its code was frozen; the frozen code runs again" in retried.stdout
    retried = own.hpc_train("retry", "--failed", "sweep", "--code", "now", cwd=tmp_path)
    assert retried.returncode == 0, retried.stdout + retried.stderr
    assert f"the present code of {tmp_path}" in retried.stdout
    assert steps(failed) == list(range(1, 7))
    assert len({event["launch"] for event in events(failed, "started")}) == 3
    assert len(events(good, "started")) == 1


@pytest.mark.long_form(45)  # tests/runs/test_comparison.py, tests/report/test_registry.py
def test_a_ci_job_trains_compares_and_keeps_the_report(cluster: Cluster, tmp_path: Path) -> None:
    script = str(REPOSITORY / "deploy" / "ci" / "train.sh")
    case = [part for part in [*TINY, *ONE_NODE, "+strategy=dp"] if not part.startswith("train.steps")]
    shell = with_python(cluster)
    ci = replace(shell, environment=shell.environment | {"RUN_NAME": "ci-1234"})
    smoke = ci.call(script, "smoke", *case, cwd=tmp_path)
    assert smoke.returncode == 0, smoke.stdout + smoke.stderr
    outputs = tmp_path / "outputs"
    assert every_step(outputs / "ci-1234-smoke") == list(range(1, 21))
    assert "<html" in (tmp_path / "report.html").read_text()
    (outputs / "last-good").write_text("outputs/ci-1234-smoke\n")
    worse = replace(ci, environment=ci.environment | {"FAIL_IF": "loss<0; loss>0*baseline", "REPORT": "full.html"})
    full = worse.call(script, "full", *case, "train.steps=4", cwd=tmp_path)
    assert full.returncode == 1, full.stdout + full.stderr
    assert "(--fail-if 'loss>0*baseline')" in full.stderr
    assert "loss<0" not in full.stderr
    assert (outputs / "last-good").read_text() == "outputs/ci-1234-smoke\n"
    assert (tmp_path / "full.html").is_file()
    (outputs / "last-good").write_text("outputs/ci-1234\n")  # the job of the last good run may be run again
    with _registry(tmp_path) as url:
        promotes = {"PROMOTE_TO": "mlflow", "MODEL": "net", "MLFLOW_TRACKING_URI": url}
        good = replace(ci, environment=ci.environment | promotes)
        full = good.call(script, "full", *case, "train.steps=4", cwd=tmp_path)
    assert full.returncode == 0, full.stdout + full.stderr
    assert "step 4 is version 1 of net as production" in full.stdout
    assert every_step(outputs / "ci-1234") == [1, 2, 3, 4], "a run that is done is not repeated"


@contextmanager
def _registry(folder: Path) -> Iterator[str]:
    """Yields the address of an MLflow server: the real one in the long form, or else a stand-in."""
    if LONG:
        with real_server(folder) as url:
            yield url
    else:
        with mlflow_service.service() as server:
            yield server.url


def damage(run: RunDirectory, step: int) -> None:
    file = next((run.checkpoints / f"step-{step:08d}").glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.long_form(90)  # tests/runs/test_diagnosis.py has the texts
def test_a_job_whose_node_is_powered_up(cloud: Cluster, tmp_path: Path) -> None:
    def shown(command: str) -> str:
        done = cloud.hpc_train(command, "mine", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return " ".join(done.stdout.split())

    def node() -> str:
        return cloud.call("sinfo", "--noheader", "--Node", "--nodes=n4", "--format=%T").stdout.split()[0]

    assert cloud.call("scontrol", "update", "nodename=n4", "state=power_down_force").returncode == 0
    wait_for("n4 to be powered down", lambda: node() == "idle~", 60)
    names = ["run.name=mine", "cluster.nodelist=n4"]
    submitted = cloud.hpc_train(*TINY, *ONE_NODE, "+strategy=dp", *names, "launch.detach=true", "-m", cwd=tmp_path)
    assert submitted.returncode == 0, submitted.stderr
    run = RunDirectory(tmp_path / "outputs" / "mine")
    job = run.record()["submissions"][-1]["job_id"]
    cloud.wait_for_state(job, "CONFIGURING")
    assert "configuring, its nodes start" in shown("status")
    explained = shown("why")
    assert "its nodes are powered up, booted or configured" in explained
    assert "n4 allocated# (starting)" in explained
    cloud.wait_for_state(job, "PENDING")  # after ResumeTimeout
    assert run.newest_attempt() == -1
    assert cloud.hpc_train("cancel", "mine", cwd=tmp_path).returncode == 0


@pytest.mark.long_form(60)  # tests/tasks/test_evaluate.py
@pytest.mark.timeout(900)
def test_a_release_as_a_job_and_its_serving_command_as_another(cluster: Cluster, tmp_path: Path) -> None:
    recorded_run(tmp_path / "outputs" / "base")
    release = ["checkpoint", "release", "base", "--registry", "none", "--submit", "--sbatch=--time=10"]
    serve = ["--serve", 'ls "$MODEL" > served', "--serve-sbatch=--time=5"]
    done = cluster.hpc_train(*release, "--to", "model", *serve, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    wait_for("the model to be served", (tmp_path / "served").exists, 240)
    assert "README.md" in (tmp_path / "served").read_text()
    (tmp_path / "served").unlink()
    failed = cluster.hpc_train(*release, "--to", "other", "--checkpoint", "99", *serve, cwd=tmp_path)
    assert failed.returncode == 2, failed.stdout
    [job_id] = re.findall(r"Slurm job (\d+) begins if", failed.stderr)
    wait_for("Slurm to remove the other job", lambda: cluster.state(job_id) in ("CANCELLED", ""), 120)
    assert not (tmp_path / "served").exists()


@pytest.mark.long_form(30)  # tests/checkpoint/test_commands.py
def test_verify_and_export_as_jobs(cluster: Cluster, tmp_path: Path) -> None:
    run = frozen(tmp_path / "outputs/mine", "+strategy=single", "cluster=slurm")
    commit(run, 3, {"model.weight": torch.ones(40, 10)})
    exported = cluster.hpc_train(
        "checkpoint", "export", "mine", "--to", "mine.pt", "--format", "pt", "--submit", "--sbatch=--time=5",
        cwd=tmp_path,
    )  # fmt: skip
    assert exported.returncode == 0, exported.stdout + exported.stderr
    first, *_, last = exported.stdout.splitlines()
    assert first.startswith("Slurm job ") and f"output in {run.logs}/slurm/checkpoint-export-" in first
    assert last.startswith("step 3, 1.56 KiB: torch.load('mine.pt'")
    assert torch.equal(torch.load(tmp_path / "mine.pt")["weight"], torch.ones(40, 10))
    damage(run, 3)
    verified = cluster.hpc_train("checkpoint", "verify", "mine", "--submit", cwd=tmp_path)
    assert verified.returncode == 1
    assert "the content does not match its checksum" in verified.stdout
    refused = cluster.hpc_train("checkpoint", "verify", "mine", "--submit", "--sbatch=--partition=none", cwd=tmp_path)
    assert refused.returncode == 2
    assert "Slurm refuses the job" in refused.stderr


@pytest.mark.long_form(25)  # tests/bench/doctor
def test_the_doctor_asks_every_node_of_a_job(cluster: Cluster, tmp_path: Path) -> None:
    asked = ["cluster=slurm", "cluster.nodes=2", "cluster.cpu_workers=1"]
    done = cluster.hpc_train("doctor", "--submit", "--verbose", *asked, cwd=tmp_path)
    text = done.stdout + done.stderr
    assert done.returncode in (0, 1), text  # 1: a small /dev/shm of this machine, say
    assert "nodes agree within 0.1 s" in text and "no report from" not in text
    assert text.count("succeed on ports of 15000-29999") == 2 and "where the ranks meet" in text
    assert "partition:" not in text  # it looked from inside the job
    assert "2 nodes (without +strategy=NAME no layout is checked)" in text and "processes on 2 nodes" not in text
    here = cluster.hpc_train("doctor", "--verbose", *asked, "cluster.partition=none", cwd=tmp_path)
    assert here.returncode == 1
    assert "the controller responds" in here.stdout and "sacctmgr responds" in here.stdout
    assert "partition 'none' does not exist" in here.stdout


@pytest.mark.long_form(30)  # tests/bench/test_bench_scaling.py
def test_nodes_are_measured_by_jobs(cluster: Cluster, tmp_path: Path) -> None:
    few = ["--steps", "1", "--pairs", "1", "--json", "-m"]
    case = ["+strategy=dp", "cluster=slurm", "cluster.cpu_workers=1", "train.threads=1", *TINY]
    done = cluster.hpc_train("bench", "scaling", "nodes=1,2", *case, *few, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    reported = [line for line in done.stderr.splitlines() if line.startswith("Slurm job ")]
    assert [line.split()[3] for line in reported] == ["1", "2", "1", "2"]
    rows = json.loads(done.stdout)["rows"]
    assert [(row["kind"], row["size"], row["ranks"]) for row in rows] == [
        ("strong", 1, 1), ("strong", 2, 2), ("weak", 1, 1), ("weak", 2, 2),
    ]  # fmt: skip


@pytest.mark.long_form(30)  # tests/bench/test_bench_machine.py
def test_a_job_measures_the_network_between_its_nodes(cluster: Cluster, tmp_path: Path) -> None:
    case = ["cluster=slurm", "cluster.nodes=2", "cluster.cpu_workers=1", *TINY]
    call = ["bench", "machine", *case, "--seconds", "0.02", "--out", "own.json", "--submit"]
    done = cluster.hpc_train(*call, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Slurm job" in done.stdout and "fabric_bytes_per_s" in done.stdout
    figures = read_machine(str(tmp_path / "own.json")).figures
    assert figures["fabric_bytes_per_s"].kind == figures["fabric_latency_s"].kind == "measured"
    assert figures["node_bytes_per_s"].kind == "assumed", "a node has one rank"


FEW = ["data.pattern=json/*.py", "batch.global_size=8", "cluster.cpu_workers=2", "train.steps=2"]
SHORT = [*TINY_GPT, *FEW, "telemetry.wandb.mode=disabled"]


@pytest.mark.parametrize("page", list(dict(lines_of_pages("slurm"))))
@pytest.mark.long_form(40, cases=["README.md"])  # docs/howto/slurm.md has the same commands and more
@pytest.mark.long_form(90, cases=["docs/howto/slurm.md"], every_share=True)
def test_the_commands_of_a_page(cluster: Cluster, tmp_path: Path, page: str) -> None:
    """As they stand there, but for fewer and smaller steps."""
    (tmp_path / "slurm").symlink_to(REPOSITORY / "slurm")
    on_cluster = with_python(cluster)
    for line in [line for found, line in lines_of_pages("slurm") if found == page]:
        call = shlex.split(line, comments=True)
        trains = any("strategy=" in part for part in call)
        done = on_cluster.call(*call, *(SHORT if trains else []), cwd=tmp_path, timeout=240)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    for run in (tmp_path / "outputs").glob("[!.]*"):
        assert "2/2" in on_cluster.call("python", "-m", "hpc_train", "status", run.name, cwd=tmp_path).stdout


def test_init_site_describes_the_cluster(call: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    """And the jobs of this shell use the file."""
    written = call("init", "--site")
    assert written.returncode == 0, written.stderr
    text = (tmp_path / "site.yaml").read_text()
    assert yaml.safe_load(text) == {
        "defaults": [{"cluster": "slurm"}],
        "cluster": {"partition": "gpu", "gpus_per_node": 4},
    }
    assert "jobs use your default account research without this key. sacctmgr show assoc: research" in text
    assert call("init", "--site").stdout.splitlines()[0].startswith(f"{tmp_path}/site.yaml is up to date")
