"""The commands on Slurm of README.md and docs/, as they stand there but for fewer and smaller steps."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.doors.command import REPOSITORY, TINY_GPT, lines_of_pages
from tests.slurm.cluster import Cluster
from tests.slurm.runs import with_python

FEW = ["data.pattern=json/*.py", "batch.global_size=8", "cluster.cpu_workers=2", "train.steps=2"]
SHORT = [*TINY_GPT, *FEW, "telemetry.wandb.mode=disabled"]


@pytest.mark.beside
@pytest.mark.parametrize("page", list(dict(lines_of_pages("slurm"))))
@pytest.mark.long_form(90, cases=["docs/howto/slurm.md"], every_share=True)
def test_the_commands_of_a_page(cluster: Cluster, tmp_path: Path, page: str) -> None:
    (tmp_path / "slurm").symlink_to(REPOSITORY / "slurm")
    on_cluster = with_python(cluster)
    for line in [line for found, line in lines_of_pages("slurm") if found == page]:
        call = shlex.split(line, comments=True)
        trains = any("strategy=" in part for part in call)
        done = on_cluster.call(*call, *(SHORT if trains else []), cwd=tmp_path, timeout=240)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    for run in (tmp_path / "outputs").glob("[!.]*"):
        assert "2/2" in on_cluster.call("python", "-m", "hpc_train", "status", run.name, cwd=tmp_path).stdout
