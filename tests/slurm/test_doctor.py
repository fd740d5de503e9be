"""``doctor`` on the nodes of a real cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster


@pytest.mark.beside
@pytest.mark.long_form(25)  # test_preflight.py asks other nodes
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
