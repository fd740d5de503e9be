"""Holds what all vendors' checks share: where a node shows its devices, their result, and a call that may hang."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.machine.health.finding import Finding
from hpc_train.machine.health.gpu_health import LIMIT_S, GpuState, NoResponse
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


def read_in_child(read: Callable[[], Any], limit_s: float = LIMIT_S) -> Any | None:
    """Returns what ``read`` returns in a forked child, through JSON; None if it raises.

    A driver may hang in the kernel where no signal ends the call; such a child is left behind.

    Raises:
        NoResponse: it takes longer than ``limit_s`` seconds.
    """
    source, target = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            _close_all_but(target)  # a child that hangs must not hold the caller's connections open
            with os.fdopen(target, "w") as file:
                json.dump(read(), file)
        os._exit(0)
    os.close(target)
    try:
        text = _receive(source, time.monotonic() + limit_s)
    finally:
        os.close(source)
    if text is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, os.WNOHANG)  # it may hang in the kernel; init inherits it
        raise NoResponse(f"no response within {limit_s:g} s")
    os.waitpid(child, 0)
    if text:
        return json.loads(text)
    return None


def _close_all_but(descriptor: int) -> None:
    for other in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if other > 2 and other != descriptor:
            with suppress(OSError):
                os.close(other)


def _receive(source: int, until: float) -> str | None:
    """Returns what the child writes; None if it has not finished in time."""
    parts: list[bytes] = []
    while select.select([source], [], [], max(0.0, until - time.monotonic()))[0]:
        part = os.read(source, 1 << 16)
        if not part:
            return b"".join(parts).decode()
        parts.append(part)
    return None
