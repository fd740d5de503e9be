"""The surroundings of ``tests.faults.chaos``: a cluster whose parts can be stopped, cut off and started again, and a
small file system of its own. Only root can make them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.faults.on_slurm import daemons, signal_all
from tests.slurm.cluster import DEVCLUSTER, Cluster, wait_for

FREEZER = Path("/sys/fs/cgroup/freezer")


@contextmanager
def stopped(found: Sequence[psutil.Process]) -> Iterator[None]:
    signal_all([*found], signal.SIGSTOP)
    try:
        yield
    finally:
        signal_all([*found], signal.SIGCONT)


@contextmanager
def uninterruptible(found: Sequence[psutil.Process]) -> Iterator[None]:
    """Keeps processes in uninterruptible sleep (D), in which no signal ends them, as on a file system that hangs."""
    group = FREEZER / f"hpc_train-chaos-{os.getpid()}"
    group.mkdir()
    try:
        for process in found:
            with suppress(ProcessLookupError):
                (group / "cgroup.procs").write_text(str(process.pid))
        (group / "freezer.state").write_text("FROZEN")
        wait_for("the freezer", lambda: (group / "freezer.state").read_text().strip() == "FROZEN", 30)
        yield
    finally:
        (group / "freezer.state").write_text("THAWED")
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                (FREEZER / "cgroup.procs").write_text(pid)
        wait_for("the group to be empty", lambda: not (group / "cgroup.procs").read_text(), 30)
        group.rmdir()


@contextmanager
def apart(cluster: Cluster, first: str, second: str) -> Iterator[None]:
    """Drops what each of two nodes sends to the other; their kernels keep the connections."""
    routes = [(namespace(cluster, here), address(cluster, there)) for here, there in ((first, second), (second, first))]
    for own, target in routes:
        subprocess.run(["ip", "-n", own, "route", "add", "blackhole", target], check=True)
    try:
        yield
    finally:
        for own, target in routes:
            subprocess.run(["ip", "-n", own, "route", "del", "blackhole", target], check=True)


def up(cluster: Cluster) -> None:
    """Starts the daemons of the cluster that do not run, and makes all nodes available again."""
    call = [sys.executable, str(DEVCLUSTER), "up", f"--state={state_of(cluster)}"]
    subprocess.run(call, env=cluster.environment, check=True, capture_output=True, timeout=120)


def state_of(cluster: Cluster) -> Path:
    return Path(cluster.environment["SLURM_CONF"]).parents[1]


def end_daemon(cluster: Cluster, name: str, number: signal.Signals) -> None:
    pid = int((state_of(cluster) / "run" / f"{name}.pid").read_text())
    os.kill(pid, number)
    wait_for(f"{name} to end", lambda: not psutil.pid_exists(pid), 30)


def namespace(cluster: Cluster, node: str) -> str:
    port = json.loads((state_of(cluster) / "etc" / "settings.json").read_text())["port"]
    return f"dc{port}-{node}"


def address(cluster: Cluster, node: str) -> str:
    lines = (state_of(cluster) / "etc" / "hosts").read_text().splitlines()
    return next(line.split()[0] for line in lines if line.split()[1] == node)


def inside_mounts(cluster: Cluster, node: str) -> list[list[str]]:
    """Returns the prefix of commands that see the mounts of ``node``."""
    return [["nsenter", f"--target={daemon.pid}", "--mount"] for daemon in daemons(cluster, node)]


def listening(cluster: Cluster, node: str) -> int:
    """Returns the number of ports on which processes of ``node`` listen; slurmd's own is one."""
    call = ["nsenter", f"--net=/run/netns/{namespace(cluster, node)}", "cat", "/proc/net/tcp", "/proc/net/tcp6"]
    shown = subprocess.run(call, check=True, capture_output=True, text=True).stdout
    return sum(line.split()[3] == "0A" for line in shown.splitlines())


@contextmanager
def own_file_system(size: str = "400M") -> Iterator[Path]:
    """Mounts a new ext4 in a file, before the nodes start, which have mount namespaces of their own."""
    with tempfile.TemporaryDirectory(prefix="hpc_train-chaos-") as folder:
        image, place = Path(folder, "image"), Path(folder, "mounted")
        place.mkdir()
        subprocess.run(["truncate", f"--size={size}", str(image)], check=True)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True)
        try:
            yield place
        finally:
            subprocess.run(["fsfreeze", "--unfreeze", str(place)], check=False, capture_output=True)
            subprocess.run(["umount", "--lazy", str(place)], check=True)
