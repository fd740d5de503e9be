"""What is edited while a job waits in the queue has no effect on it: neither config nor code, the user's nor ours."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import load
from tests.doors.command import REPOSITORY, TINY
from tests.slurm.cluster import Cluster

MODEL = """
from torch import nn

print("the model as it was at submission", __file__)


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(256, 256)

    def forward(self, inputs):
        return self.table(inputs)
"""
BROKEN = "raise SystemExit('edited while the job waited')\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's git work tree that holds a model."""
    root = tmp_path / "project"
    root.mkdir()
    (root / "own_model.py").write_text(MODEL)
    (root / ".gitignore").write_text("outputs/\n__pycache__/\n")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return root


def with_project(cluster: Cluster, project: Path) -> Cluster:
    path = f"{project}{os.pathsep}{cluster.environment['PYTHONPATH']}"
    return replace(cluster, environment={**cluster.environment, "PYTHONPATH": path})


@pytest.fixture
def shell(cluster: Cluster, project: Path) -> Cluster:
    """The cluster with an hpc_train and a config directory in the project, with their bytecode."""
    for name in ("hpc_train", "hydra_plugins", "conf"):
        shutil.copytree(REPOSITORY / name, project / name)
    return replace(cluster, environment={**cluster.environment, "PYTHONPATH": str(project)})


def edit_everything(project: Path) -> None:
    for path in [*(project / "hpc_train").rglob("*.py"), project / "own_model.py"]:
        path.write_text(BROKEN)
    for path in (project / "conf").rglob("*.yaml"):
        path.write_text("lr: 1000\n")


def arguments(project: Path) -> list[str]:
    own = [argument for argument in TINY if not argument.startswith("model.")]
    return [*own, "model=custom", "model._target_=own_model.Table", "cluster.cpu_workers=2", "+strategy=dp"]


@pytest.mark.long_form(30)
def test_edits_while_a_job_waits_have_no_effect(shell: Cluster, project: Path) -> None:
    options = ["cluster=slurm", "cluster.begin=now+3600", "cluster.nodes=1", "launch.detach=true", "-m"]
    submitted = shell.hpc_train(*arguments(project), "run.name=run", *options, cwd=project)
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    run = RunDirectory(project / "outputs" / "run")
    job = run.record()["submissions"][0]["job_id"]
    assert shell.state(job) == "PENDING"
    rate = load(run).optim.lr
    edit_everything(project)
    shell.call("scontrol", "update", f"JobId={job}", "StartTime=now")
    state = shell.wait_for_state(job, "COMPLETED", "FAILED", "TIMEOUT")
    log = "\n".join(path.read_text() for path in run.logs.rglob("*.*") if path.is_file())
    assert state == "COMPLETED", log
    assert f"the model as it was at submission {run.record()['snapshot']['snapshot']}/own_model.py" in log
    assert "edited while the job waited" not in log
    assert len(run.read_metrics()) == 6
    assert max(line["lr"] for line in run.read_metrics()) <= rate < 1000


def test_a_sweep_shares_one_snapshot(cluster: Cluster, project: Path) -> None:
    shell = with_project(cluster, project)
    options = ["cluster=slurm", "cluster.begin=now+3600", "launch.detach=true", "optim.lr=1e-3,2e-3,3e-3", "-m"]
    submitted = shell.hpc_train(*arguments(project), "run.name=sweep", *options, cwd=project)
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    sweep = project / "outputs" / "sweep"
    copies = project / "outputs" / ".code" / str(os.geteuid())
    (copy,) = [path for path in copies.iterdir() if not path.name.startswith(".") and path.is_dir()]
    assert (copy / "own_model.py").read_text() == MODEL
    records = [RunDirectory(sweep / str(number)).record() for number in range(3)]
    assert {record["snapshot"]["snapshot"] for record in records} == {str(copy)}
    shell.call("scancel", *{record["submissions"][0]["job_id"] for record in records})
