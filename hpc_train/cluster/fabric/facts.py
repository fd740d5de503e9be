"""What one node is made of, as far as it can be seen: one frozen value, which goes through JSON unchanged.

None and empty tuples mean "not known"; nothing here is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hpc_train.cluster.fabric.limits import Limits
from hpc_train.cluster.fabric.nccl_settings import Setting

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
class Link:
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
    links: tuple[Link, ...] = ()
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
    limits: Limits = field(default_factory=Limits)
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
            links=tuple(Link(**link) for link in value["links"]),
            cores=_nested(value["cores"]),
            numa=_nested(value["numa"]),
            versions=_nested(value["versions"]),
            settings=tuple(Setting(**setting) for setting in value["settings"]),
            limits=Limits(**value.get("limits", {})),
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
