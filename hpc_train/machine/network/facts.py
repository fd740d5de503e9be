"""Describes a node (GPUs, NICs, links, CPUs and process limits) as a frozen value that can be written as JSON.

None and empty tuples mean "unknown". ``Machines`` groups nodes with the same hardware, called a machine, since most
nodes of a job differ only in names and counters. A decision over thousands of nodes is computed once for each machine.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

UNLIMITED = -1  # the value of resource.RLIM_INFINITY
FLAPS = 10  # a link flaps if it has gone down this often since the counters were reset
SHARED_MEMORY = Path("/dev/shm")
_LINE = r"^{name}\s+(\d+|unlimited)\s+(\d+|unlimited)"


@dataclass(frozen=True)
class NodeLimits:
    """Holds the limits of a process. None means unknown, ``UNLIMITED`` means no limit.

    Attributes:
        locked_memory: bytes that may be locked, as RDMA NICs require (``ulimit -l``).
        open_files: open files per process (``ulimit -n``).
        most_open_files: the hard limit, to which a process may raise ``open_files`` itself.
        shared_memory: size of ``/dev/shm`` in bytes.
    """

    locked_memory: int | None = None
    open_files: int | None = None
    most_open_files: int | None = None
    shared_memory: int | None = None

    @property
    def locking(self) -> str | None:
        """Describes the limit of locked memory; None if unlimited or unknown."""
        if self.locked_memory in (None, UNLIMITED):
            return None
        return f"at most {self.locked_memory} bytes may be locked (ulimit -l)"


def read_limits(proc: Path) -> NodeLimits:
    """Reads the limits in ``/proc/self/limits`` of this process, or of the process that made the recording."""
    try:
        text = (proc / "self/limits").read_text(errors="replace")
    except OSError:
        return NodeLimits()
    limits: list[int | None] = []
    for name in ("Max locked memory", "Max open files"):
        match = re.search(_LINE.format(name=name), text, re.MULTILINE)
        words = match.groups() if match else (None, None)  # soft and hard
        for word in words:
            limits.append(UNLIMITED if word == "unlimited" else int(word) if word else None)
    return NodeLimits(limits[0], limits[2], limits[3])


def shared_memory(directory: Path = SHARED_MEMORY) -> int | None:
    """Returns the size of ``directory`` in bytes; None if it is missing."""
    try:
        status = os.statvfs(directory)
    except OSError:
        return None
    return status.f_blocks * status.f_frsize


LIMIT = 1 << 16  # more CPUs than any kernel supports; protects against typos
_PART = re.compile(r"(\d+)(?:-(\d+))?")


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Parses a list of CPUs such as ``0-3,8``; returns the numbers in ascending order. Raises ValueError if ``text`` is
    not such a list."""
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
    """Formats ``cpus`` as a list with ranges: 0, 1, 2, 5 becomes ``0-2,5``."""
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs(cpus))


def runs(cpus: Iterable[int]) -> list[list[int]]:
    """Returns ``cpus`` in ascending order, split into runs of consecutive numbers."""
    result: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if result and result[-1][-1] == cpu - 1:
            result[-1].append(cpu)
        else:
            result.append([cpu])
    return result


XGMI = "XGMI"  # AMD's Infinity Fabric between GPUs
# path types between two devices, nearest first: NVLink, then nvidia-smi's names for PCI paths
LINKS = ("NVLINK", "PIX", "PXB", "PHB", "NODE", "SYS")


@dataclass(frozen=True)
class Gpu:
    """Describes a GPU. It is numbered as in nvidia-smi and ``CUDA_DEVICE_ORDER=PCI_BUS_ID``, an AMD GPU as in
    ROCR_VISIBLE_DEVICES.

    Attributes:
        cpus: the CPUs near the GPU.
        numa_nodes: the NUMA nodes of these CPUs; several if a socket is divided into NUMA nodes.
        slices: the UUIDs of its MIG slices.
        problems: problems of the GPU as text.
    """

    index: int
    pci: str | None = None
    model: str | None = None
    uuid: str | None = None
    numa_nodes: tuple[int, ...] = ()
    cpus: tuple[int, ...] = ()
    slices: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"GPU{self.index}"

    @property
    def amd(self) -> bool:
        return (self.model or "").startswith("AMD")


@dataclass(frozen=True)
class Port:
    """Describes one port of an RDMA device.

    Attributes:
        state: ``ACTIVE``, ``DOWN``, ``INIT``, ``ARMED`` …
        physical_state: ``LINKUP``, ``POLLING``, ``DISABLED`` …
        link_layer: ``InfiniBand``, ``Ethernet`` or ``Unspecified``.
        rate_gbps: the negotiated rate of the link in Gb/s.
        link_downed: the number of times that the link went down since the counters were reset; the counter may stop at
            255.
        roce_v2_gid: the index of a routable RoCE v2 address.
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
        """Returns whether the port can carry data; None if unknown."""
        if self.state is None:
            return None
        return self.state == "ACTIVE" and self.physical_state in (None, "LINKUP", "ACTIVE")


@dataclass(frozen=True)
class Nic:
    """Describes a NIC that supports RDMA.

    Attributes:
        name: e.g. ``mlx5_0``; ``NIC0`` if only a matrix without a legend names it.
        kind: ``mellanox``, ``efa``, ``slingshot``, ``omnipath`` or ``other``; None if it is unknown.
        model: the type that the NIC reports, e.g. ``MT4129``.
    """

    name: str
    kind: str | None = None
    model: str | None = None
    pci: str | None = None
    numa_node: int | None = None
    interfaces: tuple[str, ...] = ()
    ports: tuple[Port, ...] = ()


@dataclass(frozen=True)
class Interface:
    """Describes a network interface. ``speed_gbps`` is None if the driver does not report it."""

    name: str
    up: bool
    speed_gbps: float | None = None
    default_route: bool = False


@dataclass(frozen=True)
class GpuLink:
    """The path type between two devices: ``NV4`` (four NVLinks), ``XGMI``, or a name of nvidia-smi, from ``PIX`` to
    ``SYS``.
    """

    a: str
    b: str
    path_type: str


@dataclass(frozen=True)
class Setting:
    """A variable that is already set. ``source`` is "the environment" or the path of a file."""

    name: str
    value: str
    source: str


@dataclass(frozen=True)
class NodeFacts:
    """Holds the facts of one node.

    Attributes:
        cores: the logical CPUs of each physical core; empty if unknown.
        allowed: CPUs that this process may use; empty if unknown.
        site: the cloud that the firmware reports: ``azure``, ``aws``, ``gcp`` or ``oci``.
        unknown: facts that are missing or contradictory, as text.
        numa: the CPUs of each NUMA node that has CPUs.
        allocated_cpus: CPUs that Slurm allocated to the job on this node; None outside of a job.
        visible: the GPUs of the job as CUDA_VISIBLE_DEVICES names them, in the order of local ranks.
        route: the network interface that leads to the rendezvous node.
        automatic: the interface that gloo selects by default: the one with the address of the hostname.
        topology_file: NCCL's topology file in the image of a virtual machine.
        versions: versions that must be equal on all nodes, by name.
        settings: communication settings of the user and the administrator on this node.
        gpu_direct: the kernel module with which NICs read GPU memory, ``DMA-BUF``, or ``none``.
        net_plugin: the path of NCCL's network plugin; "" if the search did not find it.
        imex_channels: the number of device files with which GPUs of several nodes share memory over NVLink; None if the
            driver does not support it.
        nvlink_domain: the NVLink domain between nodes and the clique in it, ``UUID.CLIQUE``.
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
    net_plugin: str | None = None
    imex_channels: int | None = None
    nvlink_domain: str | None = None

    def link(self, a: str, b: str) -> str | None:
        """Returns the path type between the devices ``a`` and ``b``; None if unknown."""
        return self._path_types.get(frozenset((a, b)))

    @cached_property
    def results(self) -> dict[str, Any]:
        """Holds the results of functions with ``once_per_machine``; nodes of the same machine share it."""
        return {}

    @cached_property
    def _path_types(self) -> dict[frozenset[str], str]:
        return {frozenset((link.a, link.b)): link.path_type for link in reversed(self.links)}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> NodeFacts:
        nested = {
            "gpus": tuple(Gpu(**_tuples(gpu)) for gpu in value["gpus"]),
            "nics": tuple(
                Nic(**_tuples(nic) | {"ports": tuple(Port(**p) for p in nic["ports"])}) for nic in value["nics"]
            ),
            "interfaces": tuple(Interface(**interface) for interface in value["interfaces"]),
            "links": tuple(GpuLink(**link) for link in value["links"]),
            "cores": _nested(value["cores"]),
            "numa": _nested(value["numa"]),
            "versions": _nested(value["versions"]),
            "settings": tuple(Setting(**setting) for setting in value["settings"]),
            "limits": NodeLimits(**value.get("limits", {})),
        }
        return cls(**_tuples(value) | nested)


def distance(path_type: str) -> int:
    """Returns the position of a path type in ``LINKS``; 0 for NVLink and XGMI."""
    if path_type.startswith("NV") or path_type == XGMI:
        return 0
    return LINKS.index(path_type)


def _nested(value: Any) -> tuple[Any, ...]:
    return tuple(tuple(item) for item in value)


def _tuples(value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(item) if isinstance(item, list) else item for name, item in value.items()}


Result = TypeVar("Result")


def once_per_machine(function: Callable[[NodeFacts], Result]) -> Callable[[NodeFacts], Result]:
    """Computes ``function`` once for all nodes of a machine, so its result must not depend on facts that differ between
    them."""

    name = f"{function.__module__}.{function.__qualname__}"

    @functools.wraps(function)
    def cached(facts: NodeFacts) -> Result:
        if name not in facts.results:
            facts.results[name] = function(facts)
        result: Result = facts.results[name]
        return result

    return cached


def by_machine(nodes: Iterable[NodeFacts]) -> list[list[NodeFacts]]:
    """Returns the nodes of each machine. Nodes that were not added to the same ``Machines`` count as different
    machines."""
    machines: dict[int, list[NodeFacts]] = {}
    for facts in nodes:
        machines.setdefault(id(facts.results), []).append(facts)
    return list(machines.values())


@dataclass
class Machines:
    """The distinct machines among the nodes that were added."""

    _first: dict[NodeFacts, NodeFacts] = field(default_factory=dict)  # hardware -> first node

    def add(self, facts: NodeFacts) -> NodeFacts:
        """Returns the same facts, but sharing memory and results with the first node of the same machine."""
        first = self._first.setdefault(_hardware(facts), facts)
        if first is facts:
            return facts
        return with_local_facts(first, facts.node, local_facts(facts, first))


def _hardware(facts: NodeFacts) -> NodeFacts:
    """Returns the facts that are equal for all nodes of the same machine."""

    def without_few_flaps(port: Port) -> Port:  # no decision depends on fewer than FLAPS events
        return replace(port, link_downed=0) if 0 < (port.link_downed or 0) < FLAPS else port

    names = {gpu.uuid: f"GPU-{gpu.index:04d}" for gpu in facts.gpus}
    names |= {uuid: f"MIG-{gpu.index:04d}-{i:04d}" for gpu in facts.gpus for i, uuid in enumerate(gpu.slices)}
    gpus = (
        replace(gpu, uuid=gpu.uuid and names[gpu.uuid], slices=tuple(names[uuid] for uuid in gpu.slices))
        for gpu in facts.gpus
    )
    return replace(
        facts,
        node=None,
        gpus=tuple(gpus),
        nics=tuple(_with_ports(nic, without_few_flaps) for nic in facts.nics),
        visible=tuple(names.get(name, name) for name in facts.visible),
    )


def _with_ports(nic: Nic, change: Callable[[Port], Port]) -> Nic:
    ports = tuple(map(change, nic.ports))
    if ports == nic.ports:
        return nic
    return replace(nic, ports=ports)


def local_facts(facts: NodeFacts, machine: NodeFacts) -> dict[str, Any]:
    """Returns the facts in which a node differs from ``machine``, another node of the same machine, as JSON: the
    ``uuids`` of its GPUs, ``link_downed`` by port, and the names of ``visible`` devices and ``slices`` if they differ.
    """
    downs = {f"{nic.name}:{port.number}": port.link_downed for nic in facts.nics for port in nic.ports}
    local: dict[str, Any] = {
        "uuids": [gpu.uuid for gpu in facts.gpus],
        "link_downed": {name: count for name, count in downs.items() if count},
    }
    slices, others = ([list(gpu.slices) for gpu in node.gpus] for node in (facts, machine))
    if slices != others:
        local |= {"slices": slices}
    return local | ({} if facts.visible == machine.visible else {"visible": list(facts.visible)})


def with_local_facts(machine: NodeFacts, name: str | None, local: dict[str, Any]) -> NodeFacts:
    """Returns the facts of the node ``name``, which shares the results of ``machine``, a node of the same machine."""

    def gpu(base: Gpu, uuid: str | None, slices: Sequence[str]) -> Gpu:
        return replace(base, uuid=uuid, slices=tuple(slices))

    def nic(base: Nic) -> Nic:
        def with_downs(port: Port) -> Port:
            count = local["link_downed"].get(f"{base.name}:{port.number}", 0)
            return port if port.link_downed in (None, count) else replace(port, link_downed=count)

        return _with_ports(base, with_downs)

    slices = local.get("slices", [gpu_facts.slices for gpu_facts in machine.gpus])
    facts = replace(
        machine,
        node=name,
        gpus=tuple(map(gpu, machine.gpus, local["uuids"], slices)),
        nics=tuple(map(nic, machine.nics)),
        visible=tuple(local.get("visible", machine.visible)),
    )
    facts.__dict__["results"] = machine.results
    return facts
