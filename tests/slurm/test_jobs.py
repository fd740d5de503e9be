"""Runs that Slurm starts in different ways, all submitted first: a sweep that is requeued, a batch script, a run that
is stopped and resumed."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpc_train.run.files import read_json
from tests.doors.command import REPOSITORY, TINY
from tests.slurm.cluster import Cluster, wait_for
from tests.slurm.runs import ONE_WORKER, SLOW, detail, events, every_step, job_id, losses, status, wait_for_step, why


@dataclass(frozen=True)
class Submitted:
    """The jobs in ``folder``: ``sweep`` is the command that waits for an array, ``script`` the id of a job."""

    folder: Path
    sweep: subprocess.Popen[str]
    script: str

    def run(self, name: str) -> Path:
        return self.folder / "outputs" / name


@pytest.fixture(scope="module")
def submitted(cluster: Cluster, python: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Submitted]:
    """Submits all jobs; the second one of the sweep is asked to stop, as Slurm asks before the time limit."""
    folder = tmp_path_factory.mktemp("jobs")
    one = [*SLOW, *ONE_WORKER]
    sweep = cluster.start(*one, "train.steps=20", "optim.lr=1e-3,3e-4", "run.name=sweep", "-m", cwd=folder)
    by_hand = [str(REPOSITORY / "slurm" / "multi_node.sbatch"), "+strategy=pp", *TINY, "cluster.cpu_workers=1"]
    script = python.call("sbatch", "--parsable", *by_hand, "run.name=script", cwd=folder)
    assert script.returncode == 0, script.stderr
    detached = [*one, "train.steps=40", "cluster.exclude=n3,n4", "launch.detach=true", "run.name=detached", "-m"]
    left = cluster.hpc_train(*detached, cwd=folder)
    assert left.returncode == 0, left.stdout + left.stderr
    second = folder / "outputs" / "sweep" / "1"
    wait_for_step(second, 3)
    cluster.call("scancel", "--signal=USR2", job_id(second))
    yield Submitted(folder, sweep, script.stdout.strip())
    cluster.cancel_below(folder)
    sweep.kill()


def test_a_detached_run_is_found_watched_stopped_and_resumed(cluster: Cluster, submitted: Submitted) -> None:
    run, folder = submitted.run("detached"), submitted.folder
    wait_for_step(run, 3)
    first = job_id(run)
    assert detail(cluster, first, "ExcNodeList") == "n[3-4]", "one job, not a sweep of two"
    (row,) = (row for row in status(cluster, Path("/")) if row["run"] == str(run))
    assert (row["state"], row["job_id"], row["steps"]) == ("running", first, 40)
    assert cluster.hpc_train("cancel", "detached", "--save", cwd=folder).returncode == 0
    assert cluster.hpc_train("wait", "detached", cwd=folder).returncode == 75
    cluster.wait_for_state(first, "FAILED")
    assert (detail(cluster, first, "ExitCode"), detail(cluster, first, "Restarts")) == ("75:0", "0")
    stopped_at = status(cluster, folder, "detached")[0]["step"]
    assert 3 <= stopped_at < 40
    resumed = cluster.hpc_train("resume", "outputs/detached", "--json", cwd=folder)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert {"run": str(run), "state": "done", "exit_code": 0}.items() <= json.loads(resumed.stdout).items()
    assert every_step(run) == list(range(1, 41))
    assert status(cluster, folder, "detached")[0]["state"] == "done"
    last = job_id(run)
    cluster.wait_for_state(last, "COMPLETED")
    cluster.call("scontrol", "requeuehold", last)
    fix = why(cluster, folder, "detached")["waiting"]["fix"]
    assert fix == "python -m hpc_train cancel outputs/detached", "the run is done"
    cluster.call("scancel", last)
    cluster.wait_for_state(last, "CANCELLED")
    cancelled = cluster.hpc_train("cancel", "detached", cwd=folder).stdout
    assert "cancelling 0 of 1 job; 1 is not waiting or running" in cancelled
    log = cluster.hpc_train("logs", str(run), "--rank", "all", "--attempt", "0", cwd=folder).stdout.splitlines()
    assert log == sorted(log, key=lambda line: line[:23])
    assert any(f"step {stopped_at}/40" in line for line in log)
    comment = re.compile(rf"hpc_train:{re.escape(str(run))} goodput=[01]\.\d\d\n")
    accounting = ["sacct", "-nPX", "--jobs", last, "--format=Comment"]
    wait_for("the comment in the accounting", lambda: bool(comment.fullmatch(cluster.call(*accounting).stdout)), 60)


def test_one_job_of_a_sweep_is_requeued_alone(cluster: Cluster, submitted: Submitted) -> None:
    output, _ = submitted.sweep.communicate(timeout=240)
    assert submitted.sweep.returncode == 0, output
    first, second = (submitted.run(f"sweep/{number}") for number in range(2))
    assert job_id(first).removesuffix("_0") == job_id(second).removesuffix("_1"), "they are one array"
    assert every_step(first) == every_step(second) == list(range(1, 21)), "each step was taken once"
    assert [len(events(run, "started")) for run in (first, second)] == [1, 2]
    assert len(list(first.rglob("*"))) == 17, "files and directories; docs/howto/site.md has the numbers"
    assert {path.suffix for path in (first.parent / "slurm").iterdir()} == {".sbatch", ".out", ""}
    assert len(events(second, "requeued")) == 1
    assert detail(cluster, job_id(second), "Restarts") == "1"


def test_a_batch_script_trains_on_two_nodes(cluster: Cluster, submitted: Submitted) -> None:
    state = cluster.wait_for_state(submitted.script, "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")
    (log,) = submitted.folder.glob("*.log")
    assert state == "COMPLETED", log.read_text()
    run = submitted.run("script")
    assert len(losses(run)) == 6
    meeting = read_json(run / "attempts" / "000.json")
    assert (meeting["nodes"], meeting["layout"]["pp"], meeting["layout"]["dp"]) == (2, 2, 1)
    assert f"run directory: {run}" in log.read_text() and "pp 1, dp 0, tp 0" in log.read_text()
