"""Which process is meant, and whether it is alive.

A process id alone tells little, since it is used again; with the start time of the process and the boot it tells
everything on its own machine.

What a process is doing, as the kernel says.

A child process that never outlives its parent, not even one that was killed with -9.

How many files and sockets a process may have open at a time (``ulimit -n``).

Whether a TCP port of this host is free.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any


def process(pid: int) -> dict[str, Any]:
    """What identifies the process ``pid`` of this host for as long as it lives."""
    return {"host": socket.gethostname(), "pid": pid, "pid_started": started(pid)}


def this_process() -> dict[str, Any]:
    return process(os.getpid())


def is_alive(claim: dict[str, Any]) -> bool:
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


def process_state(pid: int) -> str:
    """The letter: R runs, S sleeps, D waits for storage, T is stopped, Z has ended; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int, death_signal: signal.Signals = signal.SIGKILL) -> None:
    """Called first thing in a forked child: the kernel sends ``death_signal`` when the parent ends.

    "The parent" is the *thread* that forked: fork from one that lives as long as its process.

    Args:
        parent: process id of the parent, taken before the fork. A parent that died before this call is noticed by it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    if os.getppid() != parent:
        os._exit(1)


MOST = 1 << 20  # the kernel's default ceiling (fs.nr_open); some programs go through all descriptors one by one


def raise_descriptor_limit() -> None:
    """Sets the soft limit to the hard one; processes that start later inherit it.

    The soft limit is mostly 1024, for programs that call select(). gloo alone needs several sockets for each rank.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # the limit stays as it is
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def can_listen(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
    return True
