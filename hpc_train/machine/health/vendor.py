"""Defines where a node shows its devices, and what the check of one vendor's GPUs returns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpc_train.machine.health.finding import Finding
from hpc_train.machine.health.gpu_health import GpuState
from hpc_train.machine.health.kernel_log import Defect, GpuError


@dataclass(frozen=True)
class Paths:
    """Holds the paths where a node shows its devices; a test sets other directories."""

    pci: Path = Path("/sys/bus/pci/devices")
    driver: Path = Path("/proc/driver/nvidia/gpus")
    devices: Path = Path("/dev")
    proc: Path = Path("/proc")
    rdma: Path = Path("/sys/class/infiniband")
    kmsg: Path = Path("/dev/kmsg")
    kfd: Path = Path("/sys/class/kfd/kfd")


@dataclass(frozen=True)
class VendorHealth:
    """Represents the GPUs of one vendor.

    Attributes:
        present: GPUs of the node, also those of other jobs.
        shared: the GPUs are cut into slices, so that Slurm counts something else.
        errors: Xid and SXid errors in the kernel log.
        defects: the errors in the kernel log that prove a defect of a GPU.
    """

    present: int = 0
    shared: bool = False
    gpus: tuple[GpuState, ...] = ()
    errors: tuple[GpuError, ...] = ()
    defects: tuple[Defect, ...] = ()
    findings: tuple[Finding, ...] = ()
