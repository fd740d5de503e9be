"""Benchmarks as jobs: ``bench scaling nodes=…`` for each measurement, and ``bench machine --submit``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_train.planner.machine import read_machine
from tests.checkpoint.progress import LONG
from tests.doors.command import TINY
from tests.slurm.cluster import Cluster


@pytest.mark.beside
@pytest.mark.long_form(30)  # tests/bench/test_bench_scaling.py
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


@pytest.mark.beside
@pytest.mark.skipif(not LONG, reason="another job of two nodes: HPC_TRAIN_LONG=1")
def test_a_job_measures_the_network_between_its_nodes(cluster: Cluster, tmp_path: Path) -> None:
    case = ["cluster=slurm", "cluster.nodes=2", "cluster.cpu_workers=1", *TINY]
    call = ["bench", "machine", *case, "--seconds", "0.02", "--out", "own.json", "--submit"]
    done = cluster.hpc_train(*call, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Slurm job" in done.stdout and "fabric_bytes_per_s" in done.stdout
    figures = read_machine(str(tmp_path / "own.json")).figures
    assert figures["fabric_bytes_per_s"].kind == figures["fabric_latency_s"].kind == "measured"
    assert figures["node_bytes_per_s"].kind == "assumed", "a node has one rank"
