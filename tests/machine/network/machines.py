"""Machines written down as the kernel shows them: trees like ``/sys`` and ``/proc``, and nvidia-smi's matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Machine:
    """Builds a root directory with ``sys`` and ``proc`` piece by piece."""

    root: Path
    _names: list[str] = field(default_factory=list)

    def write(self, path: str, text: str | int) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")

    def link(self, path: str, target: Path) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).symlink_to(target)

    def numa(self, nodes: Mapping[int, str], distances: Mapping[int, str] | None = None) -> None:
        for node, cpus in nodes.items():
            self.write(f"sys/devices/system/node/node{node}/cpulist", cpus)
            if distances:
                self.write(f"sys/devices/system/node/node{node}/distance", distances[node])

    def cores(self, cores: Sequence[str]) -> None:
        """``cores``: the logical CPUs of each physical core, as 0,64."""
        for core in cores:
            for cpu in core.split(","):
                self.write(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", core)

    def pci(self, path: str, numa: int, **files: str) -> Path:
        """A device at ``pci0000:80/0000:80:01.1/0000:81:00.0`` with files like vendor; returns its directory."""
        directory = self.root / "sys/devices" / path
        files |= {"numa_node": str(numa)}
        for name, text in files.items():
            self.write(f"sys/devices/{path}/{name}", text)
        self.link(f"sys/bus/pci/devices/{directory.name}", directory)
        return directory

    def gpu(self, path: str, numa: int, model: str = "NVIDIA H100 80GB HBM3") -> None:
        directory = self.pci(path, numa, vendor="0x10de", **{"class": "0x030200"})
        text = (
            f"Model: \t\t {model}\nIRQ:   \t\t 12\nGPU UUID: \t GPU-{directory.name}\nBus Location: \t {directory.name}"
        )
        self.write(f"proc/driver/nvidia/gpus/{directory.name}/information", text)

    def card(
        self,
        name: str,
        path: str,
        numa: int,
        *,
        rate: str = "400 Gb/sec (4X NDR)",
        layer: str = "InfiniBand",
        state: str = "4: ACTIVE",
        physical: str = "5: LinkUp",
        card: str = "MT4129",
        vendor: str = "0x15b3",
        interface: str | None = None,
        downs: int = 0,
        gids: Mapping[int, tuple[str, str]] | None = None,
    ) -> None:
        """An RDMA card; ``gids``: index → (type, address)."""
        directory = self.pci(path, numa, vendor=vendor, **{"class": "0x020700"})
        device = f"sys/class/infiniband/{name}"
        self.link(f"{device}/device", directory)
        if card:
            self.write(f"{device}/hca_type", card)
        port = f"{device}/ports/1"
        texts = {"rate": rate, "link_layer": layer, "state": state, "phys_state": physical}
        for file, text in texts.items():
            self.write(f"{port}/{file}", text)
        self.write(f"{port}/counters/link_downed", downs)
        for index, (kind, address) in (gids or {}).items():
            self.write(f"{port}/gid_attrs/types/{index}", kind)
            self.write(f"{port}/gids/{index}", address)
        if interface:
            (directory / "net" / interface).mkdir(parents=True)
            self.interface(interface, directory, 100_000)

    def interface(self, name: str, device: Path, mbps: int, up: bool = True) -> None:
        self.link(f"sys/class/net/{name}/device", device)
        self.write(f"sys/class/net/{name}/speed", mbps)
        self.write(f"sys/class/net/{name}/operstate", "up" if up else "down")

    def ethernet(self, name: str, path: str, mbps: int, default_route: bool = True) -> None:
        self.interface(name, self.pci(path, 0, vendor="0x8086", **{"class": "0x020000"}), mbps)
        if default_route:
            self.write(
                "proc/net/route",
                f"Iface\tDestination\tGateway\tFlags\n{name}\t00000000\t0101A8C0\t0003\nx\t0001A8C0\t0\t1",
            )


def switch(domain: int, slot: int, port: int, below: int = 0) -> str:
    """The place of a device behind one PCI switch of a root port: host bridge, root port, switch, its port, device."""
    bus = f"{domain * 16 + slot:02x}"
    above = f"pci0000:{domain:02x}/0000:{domain:02x}:{slot:02x}.0/0000:{bus}:00.0"
    return f"{above}/0000:{bus}:{port:02x}.0/0001:{bus}:{port:02x}.{below}"


def hgx(root: Path, nics: bool = True) -> Machine:
    """Eight H100, a rail for each below the same switch, two storage ports elsewhere, management over Ethernet."""
    machine = Machine(root)
    machine.numa({0: "0-47,96-143", 1: "48-95,144-191"})
    machine.cores([f"{cpu},{cpu + 96}" for cpu in range(96)])
    for i in range(8):
        machine.gpu(switch(i // 4 * 8 + 1, i % 4 + 1, 1), i // 4)
        if nics:
            machine.card(f"mlx5_{i if i < 4 else i + 2}", switch(i // 4 * 8 + 1, i % 4 + 1, 2), i // 4)
    if nics:
        for name, domain in (("mlx5_4", 2), ("mlx5_5", 10)):
            machine.card(name, f"pci0000:{domain:02x}/0000:{domain:02x}:01.0/0000:{domain:02x}:02.0", domain // 10)
    machine.ethernet("eno1", "pci0000:00/0000:00:1c.0/0000:04:00.0", 10_000)
    return machine


def matrix(devices: Sequence[str], ways: Mapping[tuple[str, str], str], cpus: Mapping[str, str], default: str) -> str:
    """What ``nvidia-smi topo -m`` prints for ``devices``, tabs and color codes included."""
    lines = ["\t\x1b[4m" + "\t".join(devices) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m"]
    for row in devices:
        cells = [
            " X " if row == column else ways.get((row, column)) or ways.get((column, row)) or default
            for column in devices
        ]
        lines.append("\t".join([row, *cells, cpus.get(row, ""), "", "", "N/A" if row.startswith("GPU") else ""]))
    return "\n".join(
        [*lines, "", "Legend:", "", "  X    = Self", "  NV#  = Connection traversing a bonded set of # NVLinks", ""]
    )
