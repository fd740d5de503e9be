"""Measures the peak memory of this process and the utilisation of its GPU (which needs nvidia-ml-py)."""

from __future__ import annotations

import re
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean

import torch


def peak_host_memory() -> int:
    """Returns the peak resident set in bytes (VmHWM), which unlike ``ru_maxrss`` does not include the parent's."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None, "the kernel always reports it for a living process"
    return 1024 * int(found.group(1))


def peak_device_memory(device: torch.device) -> int | None:
    """Returns the peak bytes that torch's allocator held on a GPU; None on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


EVERY_S = 1.0  # NVML averages over up to a second itself


class GpuUtilisation:
    """Samples the GPU utilisation, the share of time in which a kernel ran, at most once a second.

    There are no samples without a GPU, without NVML, or on a MIG slice.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" and find_spec("pynvml") is not None else None
        self._shares: list[float] = []
        self._next = 0.0

    def look(self) -> None:
        """Takes a sample if one is due; cheap enough to be called in each step."""
        if self._device is None or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + EVERY_S
        try:
            self._shares.append(torch.cuda.utilization(self._device) / 100)
        except Exception as error:  # NVML's errors have no common base class
            print(f"cannot measure GPU utilisation: {type(error).__name__}: {error}")
            self._device = None

    def take(self) -> float | None:
        """Returns the mean since the last ``take``, in [0, 1]; None without samples."""
        shares = self._shares
        self._shares = []
        return fmean(shares) if shares else None
