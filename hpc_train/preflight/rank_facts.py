"""Reads the facts of a rank: versions, device model and NCCL's log of its transports."""

from __future__ import annotations

import os
import platform
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from hpc_train.preflight.checks import RankFacts
from hpc_train.preflight.nccl_log import Transport, parse_transport

QUIET = ("", "VERSION", "WARN")  # levels of NCCL_DEBUG that may be replaced by a log file
_DRIVER, _CPUS = Path("/proc/driver/nvidia/version"), Path("/proc/cpuinfo")


def rank_facts(rank: int, node: str, config_hash: str, device: torch.device) -> RankFacts:
    """Returns the facts of this process, without measurements."""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return RankFacts(
        rank=rank,
        node=node,
        config_hash=config_hash,
        versions=versions(cuda=gpu is not None),
        device=cpu_model() if gpu is None else gpu.name,
        gpu=None if gpu is None else str(gpu.uuid),
        gemm=0.0,
    )


def versions(cuda: bool) -> dict[str, str]:
    """Returns the versions that must be equal on all ranks."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    with suppress(PackageNotFoundError):
        found["hpc_train"] = version("hpc_train")
    if cuda:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        driver = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", _DRIVER.read_text()) if _DRIVER.exists() else None
        if driver is not None:
            found["driver"] = driver[1]
    return found


def cpu_model() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _CPUS.read_text(), re.MULTILINE) if _CPUS.exists() else None
    return found[1].strip() if found else platform.machine()


def log_transport(path: Path) -> Path | None:
    """Makes NCCL log its transports to ``path``, before its first communicator. Returns None if the user's log is in
    use.
    """
    if os.environ.get("NCCL_DEBUG", "").upper() not in QUIET or "NCCL_DEBUG_FILE" in os.environ:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(path)}
    return path


def logged_transport(path: Path | None) -> Transport | None:
    """Returns the logged transport; None without a log."""
    if path is None or not path.exists():
        return None
    return parse_transport(path.read_text(errors="replace"))
