"""``checkpoint verify|export --submit``: the command as a job of its own, followed to its end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpc_train.run.directory import RunDirectory
from tests.checkpoint.made import commit
from tests.slurm.cluster import Cluster
from tests.train.runs import frozen


def damage(run: RunDirectory, step: int) -> None:
    file = next((run.checkpoints / f"step-{step:08d}").glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.beside
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
