"""``bench scaling nodes=…``: a job for each measurement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.doors.command import TINY
from tests.slurm.cluster import Cluster


@pytest.mark.beside
def test_nodes_are_measured_by_jobs(cluster: Cluster, tmp_path: Path) -> None:
    few = ["--steps", "1", "--pairs", "1", "--json", "-m"]
    case = ["+strategy=dp", "cluster=slurm", "cluster.cpu_workers=1", "train.threads=1", *TINY]
    done = cluster.hpc_train("bench", "scaling", "nodes=1,2", *case, *few, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    *reported, last = done.stdout.splitlines()
    assert [line.split()[3] for line in reported] == ["1", "2", "1", "2"]
    rows = json.loads(last)["rows"]
    assert [(row["kind"], row["size"], row["ranks"]) for row in rows] == [
        ("strong", 1, 1), ("strong", 2, 2), ("weak", 1, 1), ("weak", 2, 2),
    ]  # fmt: skip
