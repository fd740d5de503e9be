"""AMD nodes as the kernel driver amdgpu shows them: topology, device files and the PCI bus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_train.machine.amd_gpus import AmdNode
from hpc_train.machine.gpus import Machine

ROCM = "__version__ = '2.9.0+rocm6.4'\ncuda: Optional[str] = None\nhip: Optional[str] = '6.4.43482-0f2d60242'\n"
CUDA = "__version__ = '2.9.0+cu128'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"
CPU_BUILD = "__version__ = '2.9.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"

# bus and NUMA node of the eight devices of a LUMI-G node (rocm-smi --showbus and --showtopo)
LUMI = ((0xC1, 3), (0xC6, 3), (0xC9, 1), (0xCE, 1), (0xD1, 0), (0xD6, 0), (0xD9, 2), (0xDE, 2))
GIB = 2**30


@dataclass(frozen=True)
class Kind:
    """A kind of GPU: gfx_target_version, PCI device id, bytes."""

    target: int
    device: int
    memory: int


MI250X, MI300X = Kind(90010, 0x7408, 64 * GIB), Kind(90402, 0x74A1, 192 * GIB)
RENOIR, NAVI31 = Kind(90012, 0x1636, GIB // 2), Kind(110000, 0x744C, 24 * GIB)  # an integrated GPU, a display card


class AmdMachine:
    """Builds a root directory with ``sys`` and ``dev``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.nodes = root / "sys/class/kfd/kfd/topology/nodes"
        self._count = 0
        (root / "dev").mkdir(parents=True)

    def write(self, path: str, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text + "\n")

    def cpus(self, count: int) -> None:
        """The topology also has a node per NUMA node of the CPUs."""
        for _ in range(count):
            self._node({"cpu_cores_count": 16, "simd_count": 0, "gfx_target_version": 0, "vendor_id": 0})

    def gpu(self, kind: Kind, bus: int, numa: int = 0, serial: int | None = None, peers: tuple[int, ...] = ()) -> Path:
        render = 128 + sum(1 for _ in (self.root / "dev").glob("dri/*"))
        node = self._node(
            {
                "cpu_cores_count": 0,
                "simd_count": 440,
                "gfx_target_version": kind.target,
                "vendor_id": 4098,
                "device_id": kind.device,
                "location_id": bus << 8,
                "domain": 0,
                "drm_render_minor": render,
                "unique_id": 0xA0000 + bus if serial is None else serial,
            }
        )
        folder = f"sys/class/kfd/kfd/topology/nodes/{node}"
        self.write(f"{folder}/mem_banks/0/properties", f"heap_type 1\nsize_in_bytes {kind.memory}\nwidth 4096")
        for number, peer in enumerate(peers):
            self.write(f"{folder}/io_links/{number}/properties", f"type 11\nnode_from {node}\nnode_to {peer}")
        self.write("dev/kfd", "")
        self.write(f"dev/dri/renderD{render}", "")
        self.on_bus(kind, bus, numa)
        return self.root / folder

    def on_bus(self, kind: Kind, bus: int, numa: int = 0) -> None:
        place = f"sys/devices/pci0000:{bus - 1:02x}/0000:{bus - 1:02x}:01.0/0000:{bus:02x}:00.0"
        for name, text in {"vendor": "0x1002", "device": f"0x{kind.device:04x}", "class": "0x038000"}.items():
            self.write(f"{place}/{name}", text)
        self.write(f"{place}/numa_node", str(numa))
        link = self.root / f"sys/bus/pci/devices/0000:{bus:02x}:00.0"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(self.root / place)

    def of_another_job(self, gpu: Path) -> None:
        """The kernel then refuses to read the properties; a directory cannot be read either."""
        (gpu / "properties").unlink()
        (gpu / "properties").mkdir()

    def machine(self, torch: str = ROCM) -> Machine:
        self.write("torch/version.py", torch)
        root = self.root
        return Machine(root / "no driver", root / "dev", root / "sys/bus/pci/devices", root / "torch", self.nodes)

    def node(self) -> AmdNode:
        found = AmdNode.read(self.nodes, self.root / "sys/bus/pci/devices", self.root / "dev")
        assert found is not None
        return found

    def _node(self, values: Mapping[str, int]) -> int:
        number = self._count
        self._count += 1
        text = "\n".join(f"{name} {value}" for name, value in values.items())
        self.write(f"sys/class/kfd/kfd/topology/nodes/{number}/properties", text)
        return number


def lumi(root: Path) -> AmdMachine:
    """Four MI250X, which are eight devices, and four NUMA nodes."""
    machine = AmdMachine(root)
    machine.cpus(4)
    for number, (bus, numa) in enumerate(LUMI):
        machine.gpu(MI250X, bus, numa, peers=tuple(4 + other for other in range(8) if other != number))
    return machine
