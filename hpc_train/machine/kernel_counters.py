"""Reads kernel counters without privileges: free host memory, network traffic, and out-of-memory kills.

Slurm's ``--mem`` and the memory limit of a container are limits of control groups. The kernel kills a process that
exceeds such a limit without a message, even if the node has free memory; only the counter of kills shows it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hpc_train.machine.sysfs import read_number, read_text

SYSFS = Path("/sys")
CGROUPS = SYSFS / "fs/cgroup"
PROCESSES = Path("/proc")
NODE = "the node's memory"
GROUP = "the memory limit of the job or container"


@dataclass(frozen=True)
class FreeMemory:
    """Holds the bytes that the processes under a limit may still allocate together. ``bound`` is the origin of the
    limit, ``NODE`` or ``GROUP``."""

    size: int
    bound: str


def free_memory(groups: Path = CGROUPS, processes: Path = PROCESSES, sysfs: Path = SYSFS) -> FreeMemory:
    """Returns the smallest of what the node has available and what each control group above this process leaves.

    The page cache of a group counts as free, since the kernel drops it before it kills a process.
    """
    bounds = [FreeMemory(_available(processes, sysfs), NODE)]
    group = MemoryGroup.current(groups, processes)
    for level in (group.path, *group.path.parents):
        left = _left(level, group.version)
        if left is not None:
            bounds.append(FreeMemory(left, GROUP))
        if level == group.root:
            break
    return min(bounds, key=lambda bound: bound.size)


def _available(processes: Path, sysfs: Path) -> int:
    """Returns the bytes of host memory that are available.

    On a GH200 the memory of the GPU is a NUMA node without CPUs, which MemAvailable includes; then the free memory and
    the page cache of the nodes with CPUs count.
    """
    available = 1024 * _field(processes / "meminfo", "MemAvailable:")
    nodes = [*sysfs.glob("devices/system/node/node[0-9]*")]
    with_cpus = [node for node in nodes if read_text(node / "cpulist")]
    if len(with_cpus) in (0, len(nodes)):
        return available
    size = 0
    for node in with_cpus:
        number = node.name.removeprefix("node")
        for name in ("MemFree", "Active(file)", "Inactive(file)"):
            size += 1024 * _field(node / "meminfo", f"Node {number} {name}:")
    return min(available, size)


@dataclass(frozen=True)
class MemoryGroup:
    """Names the control group that accounts for the memory of this process.

    Attributes:
        root: the top of the hierarchy: cgroup v1 has a hierarchy for memory, v2 one for all controllers.
        version: 1 or 2; 0 if the group cannot be read.
    """

    path: Path
    root: Path
    version: int

    @classmethod
    def current(cls, groups: Path = CGROUPS, processes: Path = PROCESSES) -> MemoryGroup:
        try:
            lines = (processes / "self" / "cgroup").read_text().splitlines()
        except OSError:
            return cls(groups / "unknown", groups, 0)
        paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
        if "memory" in paths:
            root = groups / "memory"
            return cls(root / paths["memory"].lstrip("/"), root, 1)
        return cls(groups / paths.get("", "").lstrip("/"), groups, 2)


def _left(group: Path, version: int) -> int | None:
    """Returns the bytes left in one group; None without a limit."""
    old = version == 1
    limits = ["memory.limit_in_bytes"] if old else ["memory.max", "memory.high"]
    bounds = [bound for bound in (read_number(group / name) for name in limits) if bound is not None]
    usage = read_number(group / ("memory.usage_in_bytes" if old else "memory.current"))
    if not bounds or usage is None:
        return None
    if old:
        names = ("total_active_file", "total_inactive_file")
    else:
        names = ("active_file", "inactive_file")
    cache = sum(_field(group / "memory.stat", name) for name in names)
    return max(0, min(bounds) - usage + cache)


def _field(file: Path, name: str) -> int:
    """Returns the number after ``name`` at the beginning of a line of ``file``, or 0."""
    match = re.search(rf"^{re.escape(name)}\s+(\d+)", read_text(file), re.MULTILINE)
    return int(match[1]) if match else 0


LANES = 4  # port_xmit_data and port_rcv_data count in units of 4 bytes (InfiniBand spec, PortCounters)


@dataclass(frozen=True)
class Traffic:
    """Holds the bytes sent and received by kind of network; None if there is no such NIC or it has no counter.

    Attributes:
        rdma_sent: bytes over RDMA ports (InfiniBand, RoCE), which the kernel's network counters do not include.
        net_sent: bytes over NICs through the kernel, without virtual interfaces.
    """

    rdma_sent: int | None = None
    rdma_received: int | None = None
    net_sent: int | None = None
    net_received: int | None = None

    def since(self, before: Traffic) -> Traffic:
        """Returns the difference to ``before``; a value is None if its counter was reset."""
        names = self.__dataclass_fields__
        differences: dict[str, int | None] = {}
        for name in names:
            now = getattr(self, name)
            then = getattr(before, name)
            differences[name] = None if now is None or then is None or now < then else now - then
        return Traffic(**differences)


def read_traffic(sysfs: Path = SYSFS) -> Traffic:
    """Returns the traffic over all NICs since the node was booted."""
    ports = list(sysfs.glob("class/infiniband/*/ports/*/counters"))
    nics = [nic / "statistics" for nic in sorted(sysfs.glob("class/net/*")) if (nic / "device").exists()]
    return Traffic(
        rdma_sent=_total([port / "port_xmit_data" for port in ports], LANES),
        rdma_received=_total([port / "port_rcv_data" for port in ports], LANES),
        net_sent=_total([nic / "tx_bytes" for nic in nics]),
        net_received=_total([nic / "rx_bytes" for nic in nics]),
    )


def _total(files: list[Path], unit: int = 1) -> int | None:
    """Returns the sum; None if any file is unreadable, since a partial sum would look like the total."""
    texts = [read_text(file) for file in files]  # some drivers return EINVAL or N/A
    if texts and all(text.isdigit() for text in texts):
        return unit * sum(map(int, texts))
    return None


@dataclass(frozen=True)
class OomKills:
    """The number of out-of-memory kills so far, in the control group of this process and on the node."""

    group: int = 0
    node: int = 0

    @classmethod
    def now(cls, groups: Path = CGROUPS, processes: Path = PROCESSES) -> OomKills:
        """Reads the counters; an unreadable counter counts as 0."""
        group = MemoryGroup.current(groups, processes)
        file = "memory.oom_control" if group.version == 1 else "memory.events"
        return cls(_field(group.path / file, "oom_kill"), _field(processes / "vmstat", "oom_kill"))

    def __sub__(self, before: OomKills) -> OomKills:
        return OomKills(self.group - before.group, self.node - before.node)
