"""What machine this is: GPUs, the Slurm step, the workers' environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_train.config.schema import ClusterConfig
from hpc_train.errors import UserError
from hpc_train.machine.allocation import LOOPBACK, current_allocation, workers_per_node
from hpc_train.machine.environment import Variable, apply, node_environment, threads_per_rank
from hpc_train.machine.gpus import Machine, visible_devices

STEP = {
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_NODEID": "2",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURMD_NODENAME": "n3",
}


UUIDS = ("GPU-aa0", "GPU-aa1", "GPU-bb", "GPU-cc")
LISTING = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aa0)
  MIG 3g.40gb     Device  0: (UUID: MIG-11)
  MIG 3g.40gb     Device  1: (UUID: MIG-12)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-aa1)
GPU 2: NVIDIA H100 80GB HBM3 (UUID: GPU-bb)
GPU 3: NVIDIA H100 80GB HBM3 (UUID: GPU-cc)
"""


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """The driver's directory on a node with four GPUs."""
    for number, uuid in enumerate(UUIDS):
        gpu = tmp_path / "gpus" / f"0000:0{number}:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(f"Model: \t NVIDIA H100\nGPU UUID: \t {uuid}\nDevice Minor: \t {number}\n")
    return tmp_path / "gpus"


@pytest.fixture(autouse=True)
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a test may put nvidia-smi; without it, this machine has none."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder / "nvidia-smi"


def prints(command: Path, text: str) -> None:
    command.write_text(f"#!/bin/sh\nwhile read -r line; do echo \"$line\"; done << 'END'\n{text}END\n")
    command.chmod(0o755)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (None, ("0", "1", "2", "3")),
        ("2,0", ("2", "0")),
        ("", ()),
        ("-1", ()),
        ("0,-1,1", ("0",)),
        ("NoDevFiles", ()),
        ("none", ()),
        ("1,7,2", ("1",)),
        ("1,1", ()),
        ("1gpu,02", ("1", "2")),  # CUDA reads numbers as strtoul does
        ("GPU-bb, GPU-cc", ("GPU-bb", "GPU-cc")),
        ("GPU-b", ("GPU-b",)),
        ("GPU-aa", ()),  # of two GPUs
        ("GPU-cc,GPU-not-there,GPU-bb", ("GPU-cc",)),
        ("GPU-not-there", ()),
        ("GPU-b,GPU-bb", ()),
        ("GPU-bb,0", ("GPU-bb",)),
        ("0,GPU-bb", ("0",)),
        ("MIG-12,MIG-11", ("MIG-12", "MIG-11")),
        ("MIG-13", ()),
    ],
)
def test_visible_gpus(nvidia_smi: Path, driver: Path, chosen: str | None, expected: tuple[str, ...]) -> None:
    environment = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    prints(nvidia_smi, LISTING)
    assert visible_devices(environment, Machine(driver)) == expected


def test_uuids_that_nothing_tells_are_accepted(driver: Path) -> None:
    (driver / "0000:00:00.0" / "information").write_text("GPU UUID: \t GPU-????????-????\nDevice Minor: \t 0\n")
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "GPU-aa,MIG-1"}, Machine(driver)) == ("GPU-aa", "MIG-1")


@pytest.mark.parametrize("listed", ["empty", "missing"])
def test_without_the_list_of_the_driver_nvidia_smi_counts(nvidia_smi: Path, tmp_path: Path, listed: str) -> None:
    """Some containers show an empty /proc/driver/nvidia/gpus."""
    (tmp_path / "empty").mkdir()
    machine = Machine(tmp_path / listed)
    assert not visible_devices({"CUDA_VISIBLE_DEVICES": "0,1"}, machine)
    prints(nvidia_smi, LISTING)
    assert len(visible_devices({}, machine)) == 4
    assert len(visible_devices({"CUDA_VISIBLE_DEVICES": "0,1"}, machine)) == 2
    assert len(visible_devices({"CUDA_VISIBLE_DEVICES": "GPU-cc,GPU-dd"}, machine)) == 1
    prints(nvidia_smi, "No devices found.\n")
    assert len(visible_devices({}, machine)) == 0


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
    with pytest.raises(UserError, match="4 GPUs per node are requested, but none is visible"):
        workers_per_node(ClusterConfig(gpus_per_node=4), 0)


def test_the_users_environment_wins() -> None:
    environment = {"OMP_NUM_THREADS": "3"}
    record = apply([*node_environment(threads=8), Variable("CUDA_CACHE_PATH", "/tmp/x", "near")], environment)
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
