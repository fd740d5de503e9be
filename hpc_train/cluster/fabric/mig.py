"""GPUs that are cut into MIG slices: which slice is of which GPU, from what ``nvidia-smi -L`` lists."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace

from hpc_train.cluster.fabric.facts import Gpu

_GPU = re.compile(r"^GPU \d+: .*\(UUID: (GPU-[^)]+)\)")
_SLICE = re.compile(r"^\s+MIG .*\(UUID: (MIG-[^)]+)\)")


def with_slices(gpus: Sequence[Gpu], listing: str) -> tuple[Gpu, ...]:
    """``gpus`` with the slices that ``listing`` gives for their UUIDs."""
    slices = parse_slices(listing)
    return tuple(replace(gpu, slices=slices.get(gpu.uuid or "", gpu.slices)) for gpu in gpus)


def parse_slices(listing: str) -> dict[str, tuple[str, ...]]:
    """The UUIDs of the slices of each GPU, by its UUID."""
    found: dict[str, tuple[str, ...]] = {}
    gpu: str | None = None
    for line in listing.splitlines():
        if match := _GPU.match(line):
            gpu = match[1]
        elif gpu is not None and (match := _SLICE.match(line)):
            found[gpu] = (*found.get(gpu, ()), match[1])
    return found


def print_listing() -> str:
    """What ``nvidia-smi -L`` prints here; empty where there is no such tool."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
