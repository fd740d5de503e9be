"""What is edited while a job waits in the queue has no effect on it: neither config nor code, the user's nor ours."""

from __future__ import annotations

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


@pytest.mark.long_form(30)  # tests/run/test_snapshot.py
def test_edits_while_a_job_waits_have_no_effect(cluster: Cluster, tmp_path: Path) -> None:
    """The work tree holds a model of the user, hpc_train and the config directory."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "own_model.py").write_text(MODEL)
    (project / ".gitignore").write_text("outputs/\n__pycache__/\n")
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    for name in ("hpc_train", "hydra_plugins", "conf"):
        shutil.copytree(REPOSITORY / name, project / name)
    shell = replace(cluster, environment={**cluster.environment, "PYTHONPATH": str(project)})
    overrides = [argument for argument in TINY if not argument.startswith("model.")]
    overrides += ["model=custom", "model._target_=own_model.Table", "cluster.cpu_workers=2", "+strategy=dp"]
    options = ["cluster=slurm", "+cluster.extra.begin=now+3600", "cluster.nodes=1", "launch.detach=true", "-m"]
    submitted = shell.hpc_train(*overrides, "run.name=run", *options, cwd=project)
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    run = RunDirectory(project / "outputs" / "run")
    job = run.record()["submissions"][0]["job_id"]
    assert shell.state(job) == "PENDING"
    rate = load(run).optim.lr
    for path in [*(project / "hpc_train").rglob("*.py"), project / "own_model.py"]:
        path.write_text(BROKEN)
    for path in (project / "conf").rglob("*.yaml"):
        path.write_text("lr: 1000\n")
    shell.call("scontrol", "update", f"JobId={job}", "StartTime=now")
    state = shell.wait_for_state(job, "COMPLETED", "FAILED", "TIMEOUT")
    log = "\n".join(path.read_text() for path in run.logs.rglob("*.*") if path.is_file())
    assert state == "COMPLETED", log
    assert f"the model as it was at submission {run.record()['snapshot']['snapshot']}/own_model.py" in log
    assert "edited while the job waited" not in log
    assert len(run.read_metrics()) == 6
    assert max(line["lr"] for line in run.read_metrics()) <= rate < 1000
