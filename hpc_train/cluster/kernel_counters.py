"""How many bytes this node has sent and received, by the kernel's own counters. Readable without privileges.

Whether the kernel killed for memory: its own counters, which every user may read. A kill leaves no other trace.

A process that goes over the limit of its control group (Slurm's ``--mem``, a container's) is killed without a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys")
LANES = 4  # port_xmit_data and port_rcv_data count in units of 4 bytes (InfiniBand spec, PortCounters)


@dataclass(frozen=True)
class Traffic:
    """Bytes, by what carried them; None where there is no such card or it does not say.

    Attributes:
        rdma_sent: over RDMA ports (InfiniBand, RoCE); the kernel's network counters do not see these.
        net_sent: over network cards, by way of the kernel; virtual interfaces are left out.
    """

    rdma_sent: int | None = None
    rdma_received: int | None = None
    net_sent: int | None = None
    net_received: int | None = None

    def since(self, before: Traffic) -> Traffic:
        """What came after ``before``; None where a counter has been set back."""
        names = self.__dataclass_fields__
        return Traffic(**{name: _difference(getattr(self, name), getattr(before, name)) for name in names})


def read_traffic(sysfs: Path = SYSFS) -> Traffic:
    """Since the node was started, over all cards."""
    ports = list(sysfs.glob("class/infiniband/*/ports/*/counters"))
    cards = [card / "statistics" for card in sorted(sysfs.glob("class/net/*")) if (card / "device").exists()]
    return Traffic(
        rdma_sent=_total([port / "port_xmit_data" for port in ports], LANES),
        rdma_received=_total([port / "port_rcv_data" for port in ports], LANES),
        net_sent=_total([card / "tx_bytes" for card in cards]),
        net_received=_total([card / "rx_bytes" for card in cards]),
    )


def _total(files: list[Path], unit: int = 1) -> int | None:
    """None where one of them cannot be read: a part of the traffic would look like all of it."""
    values = list(_numbers(files))
    return unit * sum(values) if values and len(values) == len(files) else None


def _numbers(files: list[Path]) -> Iterator[int]:
    for file in files:
        try:
            yield int(file.read_text(encoding="ascii"))
        except (OSError, ValueError):  # some drivers answer with EINVAL, or N/A
            continue


def _difference(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None or now < before else now - before


CGROUPS = Path("/sys/fs/cgroup")
COUNTER = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class OomKills:
    """Processes killed so far: in the control group of this process, and on the whole node."""

    group: int = 0
    node: int = 0

    @classmethod
    def now(cls, groups: Path = CGROUPS, processes: Path = Path("/proc")) -> OomKills:
        """What cannot be read counts as 0."""
        return cls(_counter(_events_file(groups, processes)), _counter(processes / "vmstat"))

    def __sub__(self, before: OomKills) -> OomKills:
        return OomKills(self.group - before.group, self.node - before.node)


def _events_file(groups: Path, processes: Path) -> Path:
    """Version 1 of control groups has a hierarchy for memory, version 2 one for all."""
    try:
        lines = (processes / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return groups / "unknown"
    paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    if "memory" in paths:
        return groups / "memory" / paths["memory"].lstrip("/") / "memory.oom_control"
    return groups / paths.get("", "").lstrip("/") / "memory.events"


def _counter(path: Path) -> int:
    try:
        found = COUNTER.search(path.read_text())
    except OSError:
        return 0
    return int(found[1]) if found else 0
