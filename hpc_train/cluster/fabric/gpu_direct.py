"""Whether network cards can read the memory of GPUs (GPUDirect RDMA), from the modules that the kernel has loaded."""

from __future__ import annotations

import re
from pathlib import Path

from hpc_train.cluster.fabric.rdma import read_text

MODULES = ("nvidia_peermem", "nv_peer_mem", "efa_nv_peermem")  # today's, that of before driver 470, Amazon's
DMA_BUF_KERNEL = (5, 12)  # with NVIDIA's open kernel modules (GPUDirect RDMA's documentation)
NONE = "none"


def read_gpu_direct(sysfs: Path, proc: Path) -> str | None:
    """The module that allows it, ``DMA-BUF``, or ``none``; None where the driver cannot be seen."""
    loaded = next((name for name in MODULES if (sysfs / "module" / name).is_dir()), None)
    if loaded is not None:
        return loaded
    driver = read_text(proc / "driver/nvidia/version") or ""
    kernel = re.match(r"(\d+)\.(\d+)", read_text(proc / "sys/kernel/osrelease") or "")
    if "Open Kernel Module" in driver and kernel and tuple(map(int, kernel.groups())) >= DMA_BUF_KERNEL:
        return "DMA-BUF"
    return NONE if (sysfs / "module/nvidia").is_dir() else None
