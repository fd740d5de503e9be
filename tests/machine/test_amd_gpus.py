"""AMD GPUs: which are counted and selected, and the message if they cannot be used, on machines made of files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hpc_train.machine.amd_gpus import NODES, AmdNode, amd_memory, read_gpus, restrict_to, selected
from hpc_train.machine.gpus import UnusableGpus, gpu_memory, gpus_to_use
from tests.machine.amd_nodes import CPU_BUILD, CUDA, GIB, MI250X, MI300X, NAVI31, RENOIR, ROCM, AmdMachine, lumi

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_GPUS": "0,1,2,3,4,5,6,7"}
GIVEN = STEP | {
    "SLURM_STEP_GPUS": "0,1,2,3,4,5,6,7",
    "SLURM_GPUS_ON_NODE": "8",
    "ROCR_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",  # AutoDetect=rsmi sets only this variable
}
HALF = STEP | {"SLURM_STEP_GPUS": "4,5,6,7", "SLURM_GPUS_ON_NODE": "4", "ROCR_VISIBLE_DEVICES": "4,5,6,7"}


def test_a_lumi_node(tmp_path: Path) -> None:
    gpus = read_gpus(lumi(tmp_path).nodes)
    assert [gpu.index for gpu in gpus] == list(range(8))
    first = gpus[0]
    assert (first.model, first.architecture, first.memory) == ("AMD Instinct MI250X", "gfx90a", 64 * GIB)
    assert (first.pci, first.uuid, first.peers) == ("0000:c1:00.0", "GPU-00000000000a00c1", tuple(range(5, 12)))


def test_a_mi325x_as_recorded(tmp_path: Path) -> None:
    # the properties of a real node, published with AMD's exporters
    text = (
        "cpu_cores_count 0\nsimd_count 304\nmem_banks_count 1\ncaches_count 228\nio_links_count 3\np2p_links_count 0\n"
        "max_waves_per_simd 16\nlds_size_in_kb 64\ngfx_target_version 90402\nvendor_id 4098\ndevice_id 29856\n"
        "location_id 29952\ndomain 0\ndrm_render_minor 128\nhive_id 11638818706288400384\nnum_xcc 1\n"
        "unique_id 9895604649984\n"
    )
    (tmp_path / "1").mkdir()
    (tmp_path / "1/properties").write_text(text)
    (gpu,) = read_gpus(tmp_path)
    assert (gpu.architecture, gpu.pci, gpu.compute) == ("gfx942", "0000:75:00.0", True)
    assert gpu.uuid == f"GPU-{9895604649984:016x}"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "01234567"),
        ({"ROCR_VISIBLE_DEVICES": "4,5"}, "45"),
        ({"ROCR_VISIBLE_DEVICES": "5, 4"}, "54"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-00000000000a00c6,0"}, "10"),
        ({"ROCR_VISIBLE_DEVICES": "gpu-00000000000A00C6"}, "1"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-00000000000a00"}, ""),  # ambiguous
        ({"ROCR_VISIBLE_DEVICES": "1,8,2"}, "1"),
        ({"ROCR_VISIBLE_DEVICES": "1,1,2"}, "1"),
        ({"ROCR_VISIBLE_DEVICES": ""}, ""),
        ({"ROCR_VISIBLE_DEVICES": "NoDevFiles"}, ""),
        ({"HIP_VISIBLE_DEVICES": "2,0"}, "20"),
        ({"HIP_VISIBLE_DEVICES": "2,2,0"}, "20"),
        ({"HIP_VISIBLE_DEVICES": "2, 0"}, "2"),  # HIP does not strip spaces
        ({"HIP_VISIBLE_DEVICES": "-1"}, ""),
        ({"CUDA_VISIBLE_DEVICES": "3"}, "3"),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "3"}, "1"),
        ({"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "3"}, "3"),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6,7", "HIP_VISIBLE_DEVICES": "1,2"}, "56"),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6,7", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}, ""),
    ],
)
def test_the_variables_select_as_rocm_does(tmp_path: Path, environment: Mapping[str, str], expected: str) -> None:
    found = selected(read_gpus(lumi(tmp_path).nodes), environment)
    assert "".join(str(gpu.index) for gpu in found) == expected


@pytest.mark.parametrize(
    ("asked", "environment", "expected"),
    [
        ("auto", {}, 8),
        ("auto", GIVEN, 8),
        (4, GIVEN, 4),
        ("auto", HALF, 4),
        ("auto", {"ROCR_VISIBLE_DEVICES": "2"}, 1),
        ("auto", {"CUDA_VISIBLE_DEVICES": ""}, 0),  # hidden on purpose
        ("auto", {"HIP_VISIBLE_DEVICES": "-1"}, 0),
        ("auto", {"ROCR_VISIBLE_DEVICES": ""}, 0),
    ],
)
def test_gpus_to_use(tmp_path: Path, asked: Any, environment: Mapping[str, str], expected: int) -> None:
    assert gpus_to_use(asked, environment, lumi(tmp_path).machine()) == expected


def test_only_the_jobs_own_devices_are_numbered(tmp_path: Path) -> None:
    machine = lumi(tmp_path)
    for node in (4, 5, 6, 7):
        machine.of_another_job(machine.nodes / str(node))
    own = STEP | {"SLURM_STEP_GPUS": "4,5,6,7", "SLURM_GPUS_ON_NODE": "4", "ROCR_VISIBLE_DEVICES": "0,1,2,3"}
    assert gpus_to_use("auto", own, machine.machine()) == 4
    node = machine.node()
    assert (node.installed, node.visible(own)[0].pci) == (8, "0000:d1:00.0")


def laptop(root: Path) -> AmdMachine:
    machine = AmdMachine(root)
    machine.cpus(1)
    machine.gpu(RENOIR, 5)
    return machine


def workstation(root: Path) -> AmdMachine:
    machine = AmdMachine(root)
    machine.cpus(1)
    machine.gpu(NAVI31, 3)
    return machine


@pytest.mark.parametrize("build", [laptop, workstation])
@pytest.mark.parametrize("torch", [ROCM, CPU_BUILD])
def test_integrated_and_display_gpus_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Callable[[Path], AmdMachine], torch: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    assert gpus_to_use("auto", {}, build(tmp_path).machine(torch)) == 0


def no_kfd(machine: AmdMachine) -> None:
    (machine.root / "dev/kfd").unlink()


def no_render(machine: AmdMachine) -> None:
    (machine.root / "dev/dri/renderD130").unlink()


def no_change(machine: AmdMachine) -> None:
    pass


def all_of_another_job(machine: AmdMachine) -> None:
    for node in range(4, 12):
        machine.of_another_job(machine.nodes / str(node))


TWICE = HALF | {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}


@pytest.mark.parametrize(
    ("asked", "environment", "torch", "change", "reason", "fix"),
    [
        (
            "auto", GIVEN, CPU_BUILD, no_change,
            "8 are allocated to the step, and the process can use none: torch 2.9.0+cpu is built without ROCm",
            "install a build of torch with ROCm",
        ),
        (
            "auto", {}, CUDA, no_change,
            "8 are visible, and the process can use none: torch 2.9.0+cu128 is built without ROCm, but",
            "install a build of torch with ROCm",
        ),
        (
            "auto", {}, CPU_BUILD, no_kfd,
            "the node has 8, and the process can use none: torch 2.9.0+cpu is built without ROCm",
            "install a build of torch with ROCm",
        ),
        ("auto", {}, ROCM, no_kfd, "the node has 8, and the process sees none: ", "apptainer --rocm"),
        (
            "auto", GIVEN, ROCM, no_render,
            "8 are allocated to the step, and the process sees only 2: it may not open renderD130 in ",
            "cluster.exclude=NODE",
        ),
        (
            "auto", TWICE, ROCM, no_change,
            "4 are allocated to the step, and the process sees none: ROCR_VISIBLE_DEVICES='4,5,6,7' and "
            "CUDA_VISIBLE_DEVICES='4,5,6,7' hide them: HIP counts within ROCR_VISIBLE_DEVICES",
            "add 'unset CUDA_VISIBLE_DEVICES' to cluster.setup",
        ),
        (
            4, {"HIP_VISIBLE_DEVICES": "0,1"}, ROCM, no_change,
            "4 GPUs per node are requested, and the process sees only 2: HIP_VISIBLE_DEVICES='0,1' hides them",
            "unset HIP_VISIBLE_DEVICES",
        ),
        (
            16, {}, ROCM, no_change,
            "16 GPUs per node are requested, and the process sees only 8: the driver amdgpu lists 8",
            "set cluster.gpus_per_node=8",
        ),
        (
            "auto", {"SLURM_JOB_ID": "7"}, ROCM, all_of_another_job,
            "the node has 8, and the process sees none: the job did not request GPUs from Slurm",
            "--gpus-per-node=8",
        ),
        (
            "auto", STEP | {"ROCR_VISIBLE_DEVICES": "NoDevFiles"}, ROCM, all_of_another_job,
            "8 are allocated to the job, and the process sees none: srun started the step without GPUs",
            "srun --gpus-per-node=8",
        ),
    ],
)  # fmt: skip
def test_gpus_that_cannot_be_used(
    tmp_path: Path, asked: Any, environment: Mapping[str, str], torch: str, change: Callable[[AmdMachine], None],
    reason: str, fix: str,
) -> None:  # fmt: skip
    machine = lumi(tmp_path)
    change(machine)
    with pytest.raises(UnusableGpus) as caught:
        gpus_to_use(asked, environment, machine.machine(torch))
    assert caught.value.reason.startswith(reason), caught.value.reason
    assert fix in caught.value.fix
    assert caught.value.fix.endswith("; cluster.gpus_per_node=0 trains on the CPU")


def test_without_the_driver(tmp_path: Path) -> None:
    machine = AmdMachine(tmp_path)
    for bus in (0x05, 0x26):
        machine.on_bus(MI300X, bus)
    with pytest.raises(UnusableGpus, match="the node has 2, and the process sees none: the driver amdgpu is not load"):
        gpus_to_use("auto", {}, machine.machine())


def test_a_display_card_before_the_compute_gpus(tmp_path: Path) -> None:
    """Local rank 0 would train on the card."""
    machine = AmdMachine(tmp_path)
    machine.gpu(NAVI31, 3)
    machine.gpu(MI250X, 9)
    with pytest.raises(
        UnusableGpus, match=r"HIP's device 0 is an integrated GPU or a display card \(gfx1100\)"
    ) as caught:
        gpus_to_use("auto", {}, machine.machine())
    assert "ROCR_VISIBLE_DEVICES=1" in caught.value.fix
    assert gpus_to_use("auto", {"ROCR_VISIBLE_DEVICES": "1"}, machine.machine()) == 1
    assert gpus_to_use("auto", {"ROCR_VISIBLE_DEVICES": "1,0"}, machine.machine()) == 1


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("mi250x", 64e9),
        ("mi250", 64e9),
        ("amd_instinct_mi300x", 192e9),
        ("AMD_Instinct_MI300A", 128e9),
        ("mi355x_oam", 288e9),
        ("mi999", None),
        ("mi2500", None),
    ],
)
def test_memory_by_type(kind: str, expected: float | None) -> None:
    assert amd_memory(kind) == expected
    assert "_" in kind or gpu_memory(kind) == expected


def test_runs_that_share_a_node_have_their_own_devices(tmp_path: Path) -> None:
    environment = {"ROCR_VISIBLE_DEVICES": "4,5,6,7", "HIP_VISIBLE_DEVICES": "1,2", "OTHER": "x"}
    node = lumi(tmp_path).node()
    assert [gpu.index for gpu in node.visible(environment)] == [5, 6]
    restrict_to(["6"], environment)
    assert environment == {"ROCR_VISIBLE_DEVICES": "6", "OTHER": "x"}
    assert [gpu.index for gpu in node.visible(environment)] == [6]


def test_this_machine() -> None:
    """Machines without the driver have no node."""
    assert NODES.is_dir() or AmdNode.read(NODES, Path("/sys/bus/pci/devices"), Path("/dev")) is None
