"""What the node lets a process have: memory that it may lock, files that it may open, shared memory.

Lists of CPUs and of NUMA nodes as the kernel writes them: ``0-51,104-155``.

What one node is made of, as far as it can be seen: one frozen value, which goes through JSON unchanged.

None and empty tuples mean "not known"; nothing here is guessed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpc_train.fabric.nccl_settings import Setting

UNLIMITED = -1  # as resource.RLIM_INFINITY
SHARED_MEMORY = Path("/dev/shm")
_LINE = r"^{name}\s+(\d+|unlimited)\s+(\d+|unlimited)"


@dataclass(frozen=True)
class NodeLimits:
    """None: not known; ``UNLIMITED``: there is none.

    Attributes:
        locked_memory: bytes, which RDMA cards read from (``ulimit -l``).
        open_files: of one process (``ulimit -n``).
        most_open_files: to which a process may raise that by itself.
        shared_memory: bytes, the size of ``/dev/shm``.
    """

    locked_memory: int | None = None
    open_files: int | None = None
    most_open_files: int | None = None
    shared_memory: int | None = None

    @property
    def locking(self) -> str | None:
        """How much may be locked, in words; None where that is not limited, or not known."""
        if self.locked_memory in (None, UNLIMITED):
            return None
        return f"at most {self.locked_memory} bytes may be locked (ulimit -l)"


def read_limits(proc: Path) -> NodeLimits:
    """Those of the process that reads, or of the one that copied its ``/proc/self/limits`` into a recording."""
    try:
        text = (proc / "self/limits").read_text(errors="replace")
    except OSError:
        return NodeLimits()
    locked, files = (_soft_and_hard(text, name) for name in ("Max locked memory", "Max open files"))
    return NodeLimits(locked[0], *files)


def shared_memory(directory: Path = SHARED_MEMORY) -> int | None:
    """The bytes that fit into it; None where it is missing."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize


def _soft_and_hard(text: str, name: str) -> tuple[int | None, int | None]:
    found = re.search(_LINE.format(name=name), text, re.MULTILINE)
    return (None, None) if found is None else (_limit(found[1]), _limit(found[2]))


def _limit(word: str) -> int:
    return UNLIMITED if word == "unlimited" else int(word)


LIMIT = 1 << 16  # more than any kernel is built for; a typo is not to become a list of billions
_PART = re.compile(r"(\d+)(?:-(\d+))?")


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """The numbers of a list, ascending; () for an empty one.

    Raises:
        ValueError: not such a list.
    """
    numbers: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{text!r} is not a list of CPUs like 0-3,8")
        first = int(match[1])
        last = int(match[2] or first)
        if not first <= last < LIMIT:
            raise ValueError(f"{part!r} is not a range of CPUs")
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def format_cpu_list(cpus: Iterable[int]) -> str:
    """The shortest list of ``cpus``: 0, 1, 2, 5 is ``0-2,5``."""
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs(cpus))


def runs(cpus: Iterable[int]) -> list[list[int]]:
    """``cpus`` in ascending order, cut where a number is missing."""
    found: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if found and found[-1][-1] == cpu - 1:
            found[-1].append(cpu)
        else:
            found.append([cpu])
    return found


# distances between two devices, the nearest first: NVLink, then nvidia-smi's names for ways over PCI
LINKS = ("NVLINK", "PIX", "PXB", "PHB", "NODE", "SYS")


@dataclass(frozen=True)
class Gpu:
    """One GPU, numbered as nvidia-smi and ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` number it.

    Attributes:
        cpus: the CPUs near it, as the machine says.
        numa_nodes: NUMA nodes whose CPUs those are; several where one socket is cut into more.
        slices: the UUIDs of its MIG slices.
        troubles: what is wrong with it, in words.
    """

    index: int
    pci: str | None = None
    model: str | None = None
    uuid: str | None = None
    numa_nodes: tuple[int, ...] = ()
    cpus: tuple[int, ...] = ()
    slices: tuple[str, ...] = ()
    troubles: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"GPU{self.index}"


@dataclass(frozen=True)
class Port:
    """One port of an RDMA device.

    Attributes:
        state: ``ACTIVE``, ``DOWN``, ``INIT``, ``ARMED`` …
        physical_state: ``LINKUP``, ``POLLING``, ``DISABLED`` …
        link_layer: ``InfiniBand``, ``Ethernet`` or ``Unspecified``.
        rate_gbps: of the link as it came up, in Gb/s.
        link_downed: how often the link went down since the counters were reset; 255 may stand for more.
        roce_v2_gid: the index of a RoCE v2 address that can be routed.
    """

    number: int
    state: str | None = None
    physical_state: str | None = None
    link_layer: str | None = None
    rate_gbps: float | None = None
    link_downed: int | None = None
    roce_v2_gid: int | None = None

    @property
    def active(self) -> bool | None:
        """Whether it can carry data; None where that cannot be seen."""
        if self.state is None:
            return None
        return self.state == "ACTIVE" and self.physical_state in (None, "LINKUP", "ACTIVE")


@dataclass(frozen=True)
class Nic:
    """A network card that speaks RDMA.

    Attributes:
        name: ``mlx5_0``; ``NIC0`` where only a matrix without a legend names it.
        kind: ``mellanox``, ``efa``, ``slingshot``, ``omnipath`` or ``other``; None where the name tells nothing.
        card: the type that the card reports, ``MT4129``.
        interfaces: its network interfaces.
    """

    name: str
    kind: str | None = None
    card: str | None = None
    pci: str | None = None
    numa_node: int | None = None
    interfaces: tuple[str, ...] = ()
    ports: tuple[Port, ...] = ()


@dataclass(frozen=True)
class Interface:
    """A network interface; ``speed_gbps`` is None where the driver does not say."""

    name: str
    up: bool
    speed_gbps: float | None = None
    default_route: bool = False


@dataclass(frozen=True)
class GpuLink:
    """The way between two devices: ``NV4`` (four NVLinks) or one of nvidia-smi's names, ``PIX`` … ``SYS``."""

    a: str
    b: str
    way: str


@dataclass(frozen=True)
class NodeFacts:
    """One node.

    Attributes:
        cores: logical CPUs that share one physical core; empty where it is not known.
        allowed: CPUs that this process may use; empty where it is not known.
        site: what the firmware says of where the machine stands: ``azure``, ``aws``, ``gcp``, ``oci``.
        unknown: what could not be seen or was contradictory, in words.
        numa: the CPUs of each NUMA node that has some.
        allocated_cpus: how many CPUs Slurm gave to the job here; None outside of a job.
        visible: the GPUs of the job as CUDA_VISIBLE_DEVICES names them, in the order of local rank.
        route: the network interface that leads to the node where ranks meet.
        automatic: the interface that gloo takes by itself: the one with the address of the host's name.
        topology_file: that the image of a virtual machine has for NCCL.
        versions: of what must be the same on all nodes, by name.
        settings: what the user and the administrator have set here of what concerns communication.
        limits: what a process may have.
        gpu_direct: the kernel's module by which cards read GPU memory, ``DMA-BUF``, or ``none``.
    """

    node: str | None = None
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    links: tuple[GpuLink, ...] = ()
    cores: tuple[tuple[int, ...], ...] = ()
    allowed: tuple[int, ...] = ()
    site: str | None = None
    unknown: tuple[str, ...] = ()
    numa: tuple[tuple[int, ...], ...] = ()
    allocated_cpus: int | None = None
    visible: tuple[str, ...] = ()
    route: str | None = None
    automatic: str | None = None
    topology_file: str | None = None
    versions: tuple[tuple[str, str], ...] = ()
    settings: tuple[Setting, ...] = ()
    limits: NodeLimits = field(default_factory=NodeLimits)
    gpu_direct: str | None = None

    def link(self, a: str, b: str) -> str | None:
        """The way between the devices ``a`` and ``b``; None where it is not known."""
        for link in self.links:
            if {link.a, link.b} == {a, b}:
                return link.way
        return None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> NodeFacts:
        return cls(
            gpus=tuple(Gpu(**_tuples(gpu)) for gpu in value["gpus"]),
            nics=tuple(
                Nic(**_tuples(nic) | {"ports": tuple(Port(**p) for p in nic["ports"])}) for nic in value["nics"]
            ),
            interfaces=tuple(Interface(**interface) for interface in value["interfaces"]),
            links=tuple(GpuLink(**link) for link in value["links"]),
            cores=_nested(value["cores"]),
            numa=_nested(value["numa"]),
            versions=_nested(value["versions"]),
            settings=tuple(Setting(**setting) for setting in value["settings"]),
            limits=NodeLimits(**value.get("limits", {})),
            allowed=tuple(value["allowed"]),
            visible=tuple(value["visible"]),
            unknown=tuple(value["unknown"]),
            **{name: value.get(name) for name in _PLAIN},
        )


_PLAIN = ("node", "allocated_cpus", "route", "automatic", "site", "topology_file", "gpu_direct")


def distance(way: str) -> int:
    """0 for NVLink and rising with the way; the order of ``LINKS``."""
    return 0 if way.startswith("NV") else LINKS.index(way)


def _nested(value: Any) -> tuple[Any, ...]:
    return tuple(tuple(item) for item in value)


def _tuples(value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(item) if isinstance(item, list) else item for name, item in value.items()}
