"""What machine this is: GPUs, the Slurm step, the workers' environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_train.cluster.allocation import LOOPBACK, current_allocation, workers_per_node
from hpc_train.cluster.environment import Variable, apply, own_environment, threads_per_rank
from hpc_train.cluster.gpus import visible_devices, visible_gpus
from hpc_train.config.schema import ClusterConfig
from hpc_train.errors import UserError

STEP = {
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_NODEID": "2",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURMD_NODENAME": "n3",
}


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (None, ("0", "1", "2", "3")),
        ("2,0", ("2", "0")),
        ("", ()),
        ("-1", ()),
        ("1,7,2", ("1",)),
        ("GPU-aa, GPU-bb", ("GPU-aa", "GPU-bb")),
    ],
)
def test_visible_gpus(tmp_path: Path, chosen: str | None, expected: tuple[str, ...]) -> None:
    for number in range(4):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
    environment = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert visible_devices(environment, tmp_path) == expected


def test_no_driver_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path / "missing") == 0


def test_a_slurm_step() -> None:
    allocation = current_allocation(STEP)
    assert (allocation.nodes, allocation.node_rank, allocation.node_name) == (4, 2, "n3")
    assert allocation.address == "n3"
    again = current_allocation(STEP | {"SLURM_RESTART_COUNT": "1"})
    assert again.launch_id != allocation.launch_id
    other = current_allocation(STEP | {"SLURM_NODEID": "0", "SLURMD_NODENAME": "n1"})
    assert other.launch_id == allocation.launch_id


def test_outside_a_step_there_is_one_node() -> None:
    allocation = current_allocation({"SLURM_JOB_ID": "77", "SLURM_NNODES": "4"})
    assert (allocation.nodes, allocation.node_rank, allocation.address) == (1, 0, LOOPBACK)
    assert allocation.job_id == "77"


@pytest.mark.parametrize(
    ("asked", "visible", "expected"), [("auto", 8, (8, 8)), ("auto", 0, (0, 4)), (0, 8, (0, 4)), (2, 8, (2, 2))]
)
def test_workers_per_node(asked: int | str, visible: int, expected: tuple[int, int]) -> None:
    assert workers_per_node(ClusterConfig(gpus_per_node=asked), visible) == expected


def test_more_gpus_than_there_are() -> None:
    with pytest.raises(UserError, match="4 GPUs per node are requested, but 1 are visible"):
        workers_per_node(ClusterConfig(gpus_per_node=4), 1)


def test_the_users_environment_wins() -> None:
    environment = {"OMP_NUM_THREADS": "3"}
    record = apply([*own_environment(threads=8), Variable("CUDA_CACHE_PATH", "/tmp/x", "near")], environment)
    assert environment == {"OMP_NUM_THREADS": "3", "CUDA_CACHE_PATH": "/tmp/x"}
    rows = {row["name"]: row for row in record}
    assert rows["OMP_NUM_THREADS"] == {"name": "OMP_NUM_THREADS", "value": "3", "reason": "set by the user"}
    assert rows["CUDA_CACHE_PATH"]["reason"] == "near"
    assert apply([Variable("OMP_NUM_THREADS", "3", "why")], environment)[0]["reason"] == "why"


def test_threads_share_the_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    assert threads_per_rank("auto", 1) == cores
    assert threads_per_rank("auto", 10 * cores) == 1
    assert threads_per_rank("auto", 2, bound_cores=5) == 5
    assert threads_per_rank(3, 2, bound_cores=5) == 3
