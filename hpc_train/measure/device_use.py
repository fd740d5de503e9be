"""The most memory that this process held.

How busy a GPU is, by NVML: the share of the time in which any kernel ran on it. Needs nvidia-ml-py.
"""

from __future__ import annotations

import re
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean

import torch


def peak_host_memory() -> int:
    """Bytes, the high-water mark of resident memory (VmHWM): unlike ``ru_maxrss`` a forked child's own."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None, "the kernel always reports it for a living process"
    return 1024 * int(found.group(1))


def peak_device_memory(device: torch.device) -> int | None:
    """Bytes that torch's allocator held at most on a GPU since the start; None on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


EVERY_S = 1.0  # NVML averages over up to a second itself


class GpuUtilisation:
    """Looks once a second, while somebody asks; knows nothing without a GPU, NVML or where the GPU is a MIG slice."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" and find_spec("pynvml") is not None else None
        self._shares: list[float] = []
        self._next = 0.0

    def look(self) -> None:
        """Cheap, to be called in each step."""
        if self._device is None or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + EVERY_S
        try:
            self._shares.append(torch.cuda.utilization(self._device) / 100)
        except Exception as error:  # NVML's errors have no base of torch's
            print(f"no GPU utilisation is measured: {type(error).__name__}: {error}")
            self._device = None

    def take(self) -> float | None:
        """The mean since the last ``take``, in [0, 1]; None where nothing was seen."""
        shares, self._shares = self._shares, []
        return fmean(shares) if shares else None
