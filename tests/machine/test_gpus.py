"""How many GPUs a process trains on, the error if it cannot use them, and the memory of a GPU of each kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpc_train.config.schema import ClusterConfig
from hpc_train.errors import UserError
from hpc_train.machine.allocation import workers_per_node
from hpc_train.machine.gpus import Machine, UnusableGpus, allocated_gpus, gpu_memory, gpus_to_use

# As Slurm 22.05 sets them in a step of a job that asked for GPUs, in the batch script of such a job, in a step to
# which srun gave none of the GPUs of its --exclusive job, and in a job without GPUs.
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_GPUS": "0,1,2,3"}
GIVEN = STEP | {"SLURM_STEP_GPUS": "0,1,2,3", "SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0,1", "SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1"}
CPU_JOB = {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_NODES": "2"}
HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}

CUDA = "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
CPU_BUILD = "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"


@dataclass(frozen=True)
class Kind:
    """A machine: ``driver`` lists so many GPUs (None: not loaded), of which ``locked`` belong to other jobs."""

    driver: int | None = 4
    plugged: int = 4
    locked: int = 0
    torch: str = CUDA
    vendor: str = "0x10de"
    pci_class: str = "0x030200"
    bound: str | None = None  # the kernel's driver of its PCI devices
    files: int = 0  # in /dev

    def under(self, root: Path) -> Machine:
        for number in range(self.driver or 0):
            folder = root / f"driver/0000:0{number}:00.0"
            folder.mkdir(parents=True)
            (folder / "information").write_text(f"Model: \t\t NVIDIA H100\nDevice Minor: \t {number}\n")
        if self.driver is not None:
            (root / "driver").mkdir(exist_ok=True)
        for number in range(self.plugged):
            folder = root / f"pci/0000:0{number}:00.0"
            folder.mkdir(parents=True)
            (folder / "vendor").write_text(self.vendor + "\n")
            (folder / "class").write_text(self.pci_class + "\n")
            if self.bound is not None:
                (root / "drivers" / self.bound).mkdir(parents=True, exist_ok=True)
                (folder / "driver").symlink_to(root / "drivers" / self.bound)
        (root / "dev").mkdir()
        for number in range(self.files):
            (root / f"dev/nvidia{number}").touch()
        (root / "dev/nvidiactl").touch()
        (root / "torch").mkdir()
        (root / "torch" / "version.py").write_text(self.torch)
        return Machine(root / "driver", root / "dev", root / "pci", root / "torch", root / "kfd")


@pytest.fixture(autouse=True)
def without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


HEALTHY, NO_GPU = Kind(), Kind(driver=None, plugged=0)


@pytest.mark.parametrize(
    ("asked", "environment", "kind", "expected"),
    [
        ("auto", {}, HEALTHY, 4),
        ("auto", {}, NO_GPU, 0),
        ("auto", HIDDEN, HEALTHY, 0),
        ("auto", {"CUDA_VISIBLE_DEVICES": "-1"}, Kind(torch=CPU_BUILD), 0),
        ("auto", {"CUDA_VISIBLE_DEVICES": "2,3"}, HEALTHY, 2),
        ("auto", {}, Kind(driver=None, plugged=1, vendor="0x8086", pci_class="0x030000"), 0),  # an integrated GPU
        ("auto", {}, Kind(driver=None, plugged=1, vendor="0x1a03", pci_class="0x030000"), 0),  # a server's console
        ("auto", {}, Kind(driver=None, plugged=1, pci_class="0x030000", bound="nouveau"), 0),  # drives a display
        ("auto", {}, Kind(driver=None, plugged=1, pci_class="0x040300"), 0),  # NVIDIA's sound
        ("auto", {}, Kind(driver=None, plugged=0, torch=CPU_BUILD), 0),
        (2, {}, HEALTHY, 2),
        ("auto", GIVEN, HEALTHY, 4),
        (2, GIVEN, HEALTHY, 2),
        ("auto", BATCH, HEALTHY, 2),
        ("auto", BATCH | {"CUDA_VISIBLE_DEVICES": "1"}, HEALTHY, 1),  # one of several runs in a job
        ("auto", CPU_JOB, NO_GPU, 0),
        ("auto", CPU_JOB | {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, NO_GPU, 0),
        ("auto", CPU_JOB | HIDDEN, HEALTHY, 0),
        ("auto", CPU_JOB, HEALTHY, 4),  # a site that does not tell Slurm of its GPUs
    ],
)
def test_gpus_to_use(tmp_path: Path, asked: Any, environment: Mapping[str, str], kind: Kind, expected: int) -> None:
    assert gpus_to_use(asked, environment, kind.under(tmp_path)) == expected


@pytest.mark.parametrize(
    ("asked", "environment", "kind", "reason", "fix"),
    [
        (
            "auto", GIVEN, Kind(driver=None),
            "4 are allocated to the step, and the process sees none: the NVIDIA driver is not loaded (",
            "cluster.exclude=NODE",
        ),
        (
            "auto", GIVEN, Kind(driver=None, plugged=0),
            "4 are allocated to the step, and the process sees none: the node has no NVIDIA GPU and no NVIDIA driver",
            "use nodes with NVIDIA GPUs",
        ),
        (
            "auto", GIVEN, Kind(torch=CPU_BUILD),
            "4 are allocated to the step, and the process can use none: torch 2.13.0+cpu is built without CUDA",
            "install a build of torch with CUDA",
        ),
        (
            "auto", GIVEN, Kind(driver=3),
            "4 are allocated to the step, and the process sees only 3: the NVIDIA driver lists 3",
            "cluster.exclude=NODE",
        ),
        (
            4, GIVEN, Kind(driver=0, plugged=0),
            "4 GPUs per node are requested, and the process sees none: the NVIDIA driver lists 0",
            "cluster.exclude=NODE",
        ),
        (
            "auto", GIVEN | HIDDEN, HEALTHY,
            "4 are allocated to the step, and the process sees none: CUDA_VISIBLE_DEVICES='' hides them",
            "unset CUDA_VISIBLE_DEVICES",
        ),
        (
            "auto", STEP | HIDDEN, HEALTHY,
            "4 are allocated to the job, and the process sees none: srun started the step without GPUs",
            "srun --gpus-per-node=4",
        ),
        (
            "auto", BATCH, Kind(torch=CPU_BUILD),
            "2 are allocated to the job, and the process can use none: torch 2.13.0+cpu is built without CUDA",
            "install a build",
        ),
        (
            "auto", CPU_JOB, Kind(driver=None),
            "the node has 4, and the process sees none: the job did not request GPUs from Slurm",
            "--gpus-per-node=4",
        ),
        (
            "auto", CPU_JOB | {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, HEALTHY,
            "the node has 4, and the process sees none: the job did not request GPUs from Slurm",
            "--gpus-per-node=4",
        ),
        (
            "auto", {}, Kind(driver=None, plugged=2),
            "the node has 2, and the process sees none: the NVIDIA driver is not loaded (",
            "load the driver",
        ),
        (
            "auto", {}, Kind(torch=CPU_BUILD),
            "4 are visible, and the process can use none: torch 2.13.0+cpu is built without CUDA",
            "install a build",
        ),
        (
            "auto", {}, Kind(driver=None, pci_class="0x030000", torch=CPU_BUILD),
            "the node has 4, and the process can use none: torch 2.13.0+cpu",
            "install a build",
        ),
        (
            "auto", {}, Kind(driver=None, plugged=2, bound="nouveau"),  # GPUs without a display output
            "the node has 2, and the process sees none: the NVIDIA driver is not loaded (",
            "load the driver",
        ),
        (
            "auto", {}, Kind(driver=0, plugged=0, files=2),
            "the node has 2, and the process sees none: the NVIDIA driver lists 0",
            "check nvidia-smi",
        ),
        (
            "auto", {"CUDA_VISIBLE_DEVICES": "1,1,1,1"}, HEALTHY,
            "the node has 4, and the process sees none: CUDA_VISIBLE_DEVICES='1,1,1,1' hides them",
            "unset CUDA_VISIBLE_DEVICES",
        ),
        (
            3, {}, Kind(driver=1),
            "3 GPUs per node are requested, and the process sees only 1: the NVIDIA driver lists 1",
            "cluster.gpus_per_node=1",
        ),
    ],
)  # fmt: skip
def test_gpus_that_cannot_be_used(
    tmp_path: Path, asked: Any, environment: Mapping[str, str], kind: Kind, reason: str, fix: str
) -> None:
    with pytest.raises(UnusableGpus) as caught:
        gpus_to_use(asked, environment, kind.under(tmp_path))
    assert caught.value.reason.startswith(reason), caught.value.reason
    assert fix in caught.value.fix
    assert caught.value.fix.endswith("; cluster.gpus_per_node=0 trains on the CPU")


def test_more_gpus_than_slurm_has_allocated_are_a_mistake_of_the_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="8 GPUs per node are requested, but Slurm has allocated 4") as caught:
        gpus_to_use(8, GIVEN, HEALTHY.under(tmp_path))
    assert not isinstance(caught.value, UnusableGpus)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, 0), (GIVEN, 4), (BATCH, 2), (STEP, 4), (CPU_JOB, 0), ({"SLURM_JOB_ID": "7", "SLURM_GPUS_PER_NODE": "2"}, 0)],
)
def test_what_slurm_has_allocated(environment: Mapping[str, str], expected: int) -> None:
    assert allocated_gpus(environment) == expected


def test_the_cpu_is_always_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in GIVEN.items():
        monkeypatch.setenv(name, value)
    assert workers_per_node(ClusterConfig(gpus_per_node=0, cpu_workers=3)) == (0, 3)


@pytest.mark.parametrize(
    ("kind", "gigabytes"),
    [
        ("h100", 80),
        ("H200", 141),
        ("nvidia_h100_80gb_hbm3", 80),
        ("nvidia_h100_nvl", 94),
        ("nvidia_h100_pcie", 80),
        ("nvidia_h200", 141),
        ("nvidia_b200", 180),
        ("nvidia_gh200_120gb", 96),
        ("gh200", 96),
        ("nvidia_gb200", 186),
        ("nvidia_a100-sxm4-80gb", 80),
        ("nvidia_a100-sxm-64gb", 64),
        ("nvidia_a100_80gb_pcie", 80),
        ("a100_1g.10gb", 10),
        ("nvidia_a100_3g.20gb", 20),
        ("tesla_v100-sxm2-32gb", 32),
        ("nvidia_l40s", 48),
        ("nvidia_l40", 48),
        ("nvidia_rtx_a6000", 48),
        ("nvidia-rtx-3090", 24),
        ("nvidia_geforce_rtx_4090", 24),
        ("tesla_t4", 16),
        ("a100", None),
        ("v100", None),
        ("shard", None),
        ("", None),
    ],
)
def test_memory_by_name(kind: str, gigabytes: float | None) -> None:
    assert gpu_memory(kind) == (None if gigabytes is None else gigabytes * 1e9)
