"""The README's commands on Slurm, as they stand there but for fewer and smaller steps, on a real cluster."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from tests.doors.command import REPOSITORY
from tests.slurm.cluster import Cluster

SHORT = [
    "cluster.cpu_workers=2",
    "model.dim=16",
    "model.ffn_dim=32",
    "data.sequence_length=64",
    "data.pattern=json/*.py",
    "batch.global_size=8",
    "train.steps=2",
    "telemetry.wandb.mode=disabled",
]


def commands() -> list[list[str]]:
    blocks = re.findall(r"```slurm\n(.*?)```", (REPOSITORY / "README.md").read_text(), flags=re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


def test_the_commands_of_the_readme(cluster: Cluster, tmp_path: Path) -> None:
    assert len(commands()) >= 2
    (tmp_path / "slurm").symlink_to(REPOSITORY / "slurm")
    environment = cluster.environment | {"PATH": f"{Path(sys.executable).parent}:{cluster.environment['PATH']}"}
    on_cluster = Cluster(environment)
    for line in commands():
        trains = any("strategy=" in part for part in line)
        done = on_cluster.call(*line, *(SHORT if trains else []), cwd=tmp_path, timeout=240)
        assert done.returncode == 0, f"{shlex.join(line)}\n{done.stdout}{done.stderr}"
    assert "2/2" in on_cluster.call("python", "-m", "hpc_train", "status", "far", cwd=tmp_path).stdout
