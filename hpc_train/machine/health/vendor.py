"""Defines the paths where a node shows its devices, and the result of checking the GPUs of one vendor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpc_train.machine.health.finding import Finding
from hpc_train.machine.health.gpu_health import GpuState
from hpc_train.machine.health.kernel_log import GpuError


@dataclass(frozen=True)
class Paths:
    """Holds the paths where a node shows its devices. Tests use other directories."""

    pci: Path = Path("/sys/bus/pci/devices")
    driver: Path = Path("/proc/driver/nvidia/gpus")
    devices: Path = Path("/dev")
    proc: Path = Path("/proc")
    rdma: Path = Path("/sys/class/infiniband")
    kmsg: Path = Path("/dev/kmsg")
    kfd: Path = Path("/sys/class/kfd/kfd")


@dataclass(frozen=True)
class VendorHealth:
    """Holds the result of checking the GPUs of one vendor.

    Attributes:
        present: the number of GPUs of the node, including GPUs of other jobs.
        shared: whether the GPUs are divided into slices, so that Slurm's count differs.
        errors: the errors in the kernel log.
    """

    present: int = 0
    shared: bool = False
    gpus: tuple[GpuState, ...] = ()
    errors: tuple[GpuError, ...] = ()
    findings: tuple[Finding, ...] = ()
