"""How many GPUs this process may use, found without CUDA: a CUDA call here would cost a context and forbid forking."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia/gpus")
DEVICES = Path("/dev")
NO_DEVICES = "NoDevFiles"  # CUDA_VISIBLE_DEVICES of a step without GPUs, from old versions of Slurm


def visible_gpus(environment: Mapping[str, str] = os.environ, driver: Path = DRIVER) -> int:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves of those that the driver has; 0 without a driver."""
    return len(visible_devices(environment, driver))


def visible_devices(
    environment: Mapping[str, str] = os.environ, driver: Path = DRIVER, devices: Path = DEVICES
) -> tuple[str, ...]:
    """The visible GPUs by the names that CUDA_VISIBLE_DEVICES takes: numbers, or the UUIDs that stand there."""
    present = _present(driver, devices)
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return tuple(str(index) for index in range(present))
    names: list[str] = []
    for name in (part.strip() for part in chosen.split(",")):
        if (name.isdigit() and int(name) >= present) or not name or name.startswith("-") or name == NO_DEVICES:
            break  # CUDA itself stops at the first device that is not there
        names.append(name)
    return tuple(names) if present else ()


def own_gpus(driver: Path = DRIVER, devices: Path = DEVICES) -> tuple[str, ...]:
    """PCI addresses of the driver's GPUs that the job's control group lets this process open, in the order of CUDA.

    CUDA counts only these, while ``/proc`` and ``/sys`` show those of other jobs on the node as well.
    """
    if not driver.is_dir():
        return ()
    return tuple(path.name for path in sorted(driver.iterdir()) if _may_open(path, devices))


def _may_open(gpu: Path, devices: Path) -> bool:
    try:
        found = re.search(r"^Device Minor:\s*(\d+)", (gpu / "information").read_text(), re.MULTILINE)
    except OSError:
        return True
    device = devices / f"nvidia{found[1]}" if found else None
    # access() asks the control group too, and wakes no GPU
    return device is None or not device.exists() or os.access(device, os.R_OK | os.W_OK)


def _present(driver: Path, devices: Path) -> int:
    if driver.is_dir():
        return len(own_gpus(driver, devices))
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
