"""Which process is meant, and whether it is alive.

A process id alone tells little, since it is used again; with the start time of the process and the boot it tells
everything on its own machine.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any


def process(pid: int) -> dict[str, Any]:
    """What identifies the process ``pid`` of this host for as long as it lives."""
    return {"host": socket.gethostname(), "pid": pid, "pid_started": started(pid)}


def this_process() -> dict[str, Any]:
    return process(os.getpid())


def lives(claim: dict[str, Any]) -> bool:
    """Whether the process of a submission or claim is alive on this host."""
    pid = claim.get("pid")
    if pid is None or claim.get("host") != socket.gethostname():
        return False
    found = started(pid)
    return found is not None and found == claim.get("pid_started")


def started(pid: int) -> str | None:
    """Boot id and the start of the process in clock ticks since then; None for a process that is gone or a zombie."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = boot_id()
    except OSError:
        return None
    return None if state == "Z" else f"{boot}:{fields[18]}"


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
