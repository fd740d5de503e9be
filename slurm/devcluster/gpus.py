"""The GPUs of the nodes: character devices without a driver, which Slurm hands to jobs that ask for GPUs.

As root on a machine with control groups (version 1), a job may open only the devices that it was given, as on most
sites (``ConstrainDevices``), and with ``--limit-memory`` the kernel kills what exceeds the memory of its job there
(``ConstrainRAMSpace``). Elsewhere it may open all of them. Nodes without GPUs are never constrained.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from daemons import Cluster

GPUS = {"n5": "gpu:4", "n6": "gpu:a100:4", "n7": "gpu:a100:2"}
MAJOR = 60  # 60 to 63 are for local use and belong to no driver (Linux: admin-guide/devices.txt)
CGROUPS = Path("/sys/fs/cgroup")
CONSTRAINED = f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={CGROUPS}\nConstrainDevices=yes\n"


def gpu_count(node: str) -> int:
    return int(GPUS[node].rpartition(":")[2]) if node in GPUS else 0


def task_plugin() -> str:
    return "task/cgroup" if _may_constrain() else "task/none"


def write_gpus(cluster: Cluster) -> None:
    """Makes the devices and the files of Slurm about them."""
    files = _device_files(cluster)
    (cluster.state / "etc" / "gres.conf").write_text("".join(_gres_line(node, files) for node in GPUS))
    if _may_constrain():
        # slurmd reads cgroup.conf beside slurm.conf: the nodes with GPUs have a directory of their own
        (cluster.state / "etc" / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (cluster.state / "etc-gpu").mkdir(exist_ok=True)
        memory = "ConstrainRAMSpace=yes\n" if cluster.limit_memory else ""
        (cluster.state / "etc-gpu" / "cgroup.conf").write_text(CONSTRAINED + memory)
        for name in ("slurm.conf", "gres.conf", "topology.conf"):
            link = cluster.state / "etc-gpu" / name
            link.unlink(missing_ok=True)
            link.symlink_to(cluster.state / "etc" / name)
        if cluster.limit_memory:  # slurmd refuses to limit the memory in two ways
            text = cluster.conf.read_text().replace("JobAcctGatherParams=OverMemoryKill\n", "")
            (cluster.state / "etc-gpu" / "slurm.conf").unlink()
            (cluster.state / "etc-gpu" / "slurm.conf").write_text(text)


def conf_of(cluster: Cluster, node: str) -> Path:
    """The slurm.conf of ``node``."""
    return cluster.state / "etc-gpu" / "slurm.conf" if node in GPUS and _may_constrain() else cluster.conf


def remove_groups(jobs: range) -> None:
    """Removes the control groups of this cluster's jobs that a killed daemon has left."""
    for node in GPUS:
        for group in sorted(CGROUPS.glob(f"[dm]*/slurm_{node}/uid_*/job_*/**/"), reverse=True):
            job = next(part for part in group.parts if part.startswith("job_"))
            if int(job.removeprefix("job_")) in jobs:
                try:
                    group.rmdir()
                except OSError:
                    continue


def _may_constrain() -> bool:
    devices = CGROUPS / "devices"
    return os.geteuid() == 0 and (devices / "release_agent").exists() and os.access(devices, os.W_OK)


def _device_files(cluster: Cluster) -> str:
    """Devices as Slurm's ``File`` names them: without one it sets no CUDA_VISIBLE_DEVICES."""
    folder = cluster.state / "dev"
    try:
        for minor in range(max(map(gpu_count, GPUS))):
            path = folder / f"nvidia{minor}"
            if not path.exists():
                os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(MAJOR, minor))
        return f"{folder}/nvidia"
    except PermissionError:
        return "/dev/tty"


def _gres_line(node: str, files: str) -> str:
    _, *kind, count = GPUS[node].split(":")
    of_type = f" Type={kind[0]}" if kind else ""
    return f"NodeName={node} Name=gpu{of_type} File={files}[0-{int(count) - 1}]\n"
