"""Counters of the kernel that need no privileges: bytes that this node has sent and received, and out-of-memory kills.

A process that exceeds the memory limit of its control group (Slurm's ``--mem``, a container's) is killed without a
message; the counter is the only trace.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpc_train.machine.host_memory import CGROUPS, PROCESSES, MemoryGroup

SYSFS = Path("/sys")
LANES = 4  # port_xmit_data and port_rcv_data count in units of 4 bytes (InfiniBand spec, PortCounters)


@dataclass(frozen=True)
class Traffic:
    """Bytes by kind of network; None if there is no such NIC or it has no counter.

    Attributes:
        rdma_sent: over RDMA ports (InfiniBand, RoCE), which the kernel's network counters do not include.
        net_sent: over NICs through the kernel, without virtual interfaces.
    """

    rdma_sent: int | None = None
    rdma_received: int | None = None
    net_sent: int | None = None
    net_received: int | None = None

    def since(self, before: Traffic) -> Traffic:
        """Returns the difference to ``before``; None if a counter was reset."""
        names = self.__dataclass_fields__
        return Traffic(**{name: _difference(getattr(self, name), getattr(before, name)) for name in names})


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
    """Returns the sum, or None if any file is unreadable, since a partial sum would look like all traffic."""
    values = list(_numbers(files))
    if values and len(values) == len(files):
        return unit * sum(values)
    return None


def _numbers(files: list[Path]) -> Iterator[int]:
    for file in files:
        try:
            yield int(file.read_text(encoding="ascii"))
        except (OSError, ValueError):  # some drivers return EINVAL or N/A
            continue


def _difference(now: int | None, before: int | None) -> int | None:
    if now is None or before is None or now < before:
        return None
    return now - before


COUNTER = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class OomKills:
    """The number of processes killed for memory so far, in this process's control group and on the node."""

    group: int = 0
    node: int = 0

    @classmethod
    def now(cls, groups: Path = CGROUPS, processes: Path = PROCESSES) -> OomKills:
        """Reads the counters; an unreadable counter counts as 0."""
        return cls(_counter(_events_file(groups, processes)), _counter(processes / "vmstat"))

    def __sub__(self, before: OomKills) -> OomKills:
        return OomKills(self.group - before.group, self.node - before.node)


def _events_file(groups: Path, processes: Path) -> Path:
    """Returns the file of the counter in this process's control group."""
    group = MemoryGroup.current(groups, processes)
    return group.path / ("memory.oom_control" if group.version == 1 else "memory.events")


def _counter(path: Path) -> int:
    try:
        match = COUNTER.search(path.read_text())
    except OSError:
        return 0
    if match:
        return int(match[1])
    return 0
