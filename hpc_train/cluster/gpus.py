"""How many GPUs this process may use, found without CUDA: a CUDA call here would cost a context and forbid forking."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia/gpus")


def visible_gpus(environment: Mapping[str, str] = os.environ, driver: Path = DRIVER) -> int:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves of those that the driver has; 0 without a driver."""
    return len(visible_devices(environment, driver))


def visible_devices(environment: Mapping[str, str] = os.environ, driver: Path = DRIVER) -> tuple[str, ...]:
    """The visible GPUs by the names that CUDA_VISIBLE_DEVICES takes: numbers, or the UUIDs that stand there."""
    present = _present(driver)
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return tuple(str(index) for index in range(present))
    names: list[str] = []
    for name in (part.strip() for part in chosen.split(",")):
        if (name.isdigit() and int(name) >= present) or not name or name.startswith("-"):
            break  # CUDA itself stops at the first device that is not there
        names.append(name)
    return tuple(names) if present else ()


def _present(driver: Path) -> int:
    if driver.is_dir():
        return len(list(driver.iterdir()))
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
