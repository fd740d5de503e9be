"""The most memory that this process held."""

from __future__ import annotations

import re
from pathlib import Path

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
