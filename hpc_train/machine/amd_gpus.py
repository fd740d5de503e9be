"""Finds the AMD Instinct GPUs that this process may use, or the reason why it cannot use them, without torch or HIP.

The kernel driver amdgpu lists each device in ``/sys/class/kfd/kfd/topology/nodes``: an MI250X is two devices (GCDs),
and a partitioned MI300X is several. The ROCm runtime numbers the topology nodes with compute units that the job's
control group lets the process read; ROCR_VISIBLE_DEVICES selects and orders them. HIP then selects among these with
HIP_VISIBLE_DEVICES or, if that is empty, with CUDA_VISIBLE_DEVICES (sources: ROCR-Runtime's ``amd_filter_device.cpp``
and clr's ``rocdevice.cpp``). Slurm sets ROCR_VISIBLE_DEVICES. Without ``AutoDetect`` or ``Flags`` in gres.conf, it also
sets CUDA_VISIBLE_DEVICES with the same numbers.

Integrated GPUs and Radeon cards, which HIP also numbers, are not counted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from hpc_train.machine.sysfs import read_text

NODES = Path("/sys/class/kfd/kfd/topology/nodes")
PCI = Path("/sys/bus/pci/devices")
VENDOR = "0x1002"
VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
NO_DEVICES = "NoDevFiles"  # old versions of Slurm set this value in a step without GPUs

# gfx_target_version of CDNA: gfx908, gfx90a, gfx940 to gfx942, gfx950. gfx909 and gfx90c are integrated GPUs.
COMPUTE = {90008, 90010, 90400, 90401, 90402, 90500}
# libdrm's amdgpu.ids (2026), by PCI device id
_PRODUCTS = {
    0x738C: "MI100",
    0x738E: "MI100",
    0x7408: "MI250X",
    0x740C: "MI250X / MI250",
    0x740F: "MI210",
    0x7410: "MI210 VF",
    0x74A0: "MI300A",
    0x74A1: "MI300X",
    0x74A2: "MI308X",
    0x74A5: "MI325X",
    0x74A8: "MI308X HF",
    0x74A9: "MI300X HF",
    0x74B5: "MI300X VF",
    0x74B6: "MI308X",
    0x74BD: "MI300X HF",
    0x75A0: "MI350X",
    0x75A3: "MI355X",
    0x75B0: "MI350X VF",
    0x75B3: "MI355X VF",
}
# bytes of one device according to AMD's data sheets; an MI250 or MI250X is two devices
AMD_MEMORY = {
    "mi100": 32e9,
    "mi210": 64e9,
    "mi250": 64e9,
    "mi250x": 64e9,
    "mi300a": 128e9,
    "mi300x": 192e9,
    "mi308x": 192e9,
    "mi325x": 256e9,
    "mi350x": 288e9,
    "mi355x": 288e9,
}
_VRAM = (1, 2)  # heap types of a memory bank: visible and invisible to the CPU
_XGMI = 11  # type of a link


def amd_memory(kind: str) -> float | None:
    """Returns the bytes of memory of a device of the GRES type ``kind``, such as ``mi250x`` or ``amd_instinct_mi300x``;
    None if it is not a known Instinct GPU.
    """
    match = re.search(r"(?<![a-z0-9])mi\d{3}[ax]?(?![0-9])", kind.lower())
    if match is None:
        return None
    return AMD_MEMORY.get(match[0])


@dataclass(frozen=True)
class AmdGpu:
    """Describes one device of the driver.

    Attributes:
        index: its number in ROCR_VISIBLE_DEVICES.
        node: its number in the driver's topology.
        target: the instruction set, e.g. 90402 for gfx942.
        product: the PCI device id.
        unique_id: its serial number; 0 if the driver does not report it.
        render: the number of its device file ``/dev/dri/renderD*``.
        memory: bytes of its memory.
        peers: the topology numbers of the devices to which it is connected over Infinity Fabric (xGMI).
    """

    index: int
    node: int
    pci: str
    target: int
    product: int
    unique_id: int
    render: int
    memory: int
    peers: tuple[int, ...]

    @property
    def compute(self) -> bool:
        return self.target in COMPUTE

    @property
    def architecture(self) -> str:
        return f"gfx{self.target // 10000}{self.target // 100 % 100:x}{self.target % 100:x}"

    @property
    def model(self) -> str:
        name = _PRODUCTS.get(self.product)
        if name is None:
            return f"AMD {self.architecture}"
        return f"AMD Instinct {name}"

    @property
    def uuid(self) -> str | None:
        """Returns the UUID with which ROCR_VISIBLE_DEVICES may also select the device; None if it has none."""
        if self.unique_id:
            return f"GPU-{self.unique_id:016x}"
        return None


def read_gpus(nodes: Path = NODES) -> tuple[AmdGpu, ...]:
    """Returns all devices that the control group lets this process read, including integrated GPUs, in ROCm's order."""
    gpus: list[AmdGpu] = []
    for folder in _numbered(nodes):
        values = _properties(folder / "properties")
        if not values.get("simd_count", 0) or values.get("vendor_id", 0) != int(VENDOR, 16):
            continue
        place = values.get("location_id", 0)  # bits of the PCI address
        bus, device, function = place >> 8 & 0xFF, place >> 3 & 0x1F, place & 7
        banks = [_properties(path) for path in folder.glob("mem_banks/*/properties")]
        links = [_properties(path) for kind in ("io", "p2p") for path in folder.glob(f"{kind}_links/*/properties")]
        peers = {link["node_to"] for link in links if link.get("type") == _XGMI and "node_to" in link}
        gpu = AmdGpu(
            index=len(gpus),
            node=int(folder.name),
            pci=f"{values.get('domain', 0):04x}:{bus:02x}:{device:02x}.{function}",
            target=values.get("gfx_target_version", 0),
            product=values.get("device_id", 0),
            unique_id=values.get("unique_id", 0),
            render=values.get("drm_render_minor", 0),
            memory=sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in _VRAM),
            peers=tuple(sorted(peers)),
        )
        gpus.append(gpu)
    return tuple(gpus)


def _numbered(nodes: Path) -> list[Path]:
    return sorted((path for path in nodes.glob("[0-9]*") if path.name.isdigit()), key=lambda path: int(path.name))


def _properties(path: Path) -> dict[str, int]:
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:  # EPERM: the device belongs to another job
        return {}
    return {fields[0]: int(fields[1]) for fields in lines if len(fields) == 2 and fields[1].isdigit()}


def selected(gpus: tuple[AmdGpu, ...], environment: Mapping[str, str]) -> tuple[AmdGpu, ...]:
    """Returns the devices that the variables leave visible, in HIP's order.

    The ROCm runtime takes devices up to the first name that is unknown, ambiguous or repeated. HIP takes devices up to
    the first invalid name; its numbers index ROCR_VISIBLE_DEVICES, and it ignores repetitions.
    """
    visible = list(gpus)
    if (names := environment.get("ROCR_VISIBLE_DEVICES")) is not None:
        visible = []
        for name in map(str.strip, names.upper().split(",")):
            if name.isdigit():
                matching = [gpu for gpu in gpus if gpu.index == int(name)]
            else:  # the name may be a prefix of a UUID
                matching = [
                    gpu for gpu in gpus if len(name) > len("GPU-") and (gpu.uuid or "").upper().startswith(name)
                ]
            if len(matching) != 1 or matching[0] in visible:
                break
            visible += matching
    if not (names := _for_hip(environment)):
        return tuple(visible)
    by_name = {str(number): gpu for number, gpu in enumerate(visible)} | {gpu.uuid: gpu for gpu in visible if gpu.uuid}
    chosen = [by_name[name] for name in takewhile(by_name.__contains__, names.split(","))]
    return tuple(dict.fromkeys(chosen))


def _for_hip(environment: Mapping[str, str]) -> str:
    return environment.get("HIP_VISIBLE_DEVICES") or environment.get("CUDA_VISIBLE_DEVICES", "")


def restrict_to(names: Sequence[str], environment: MutableMapping[str, str] = os.environ) -> None:
    """Restricts this process and its children to the devices ``names``, as named in ROCR_VISIBLE_DEVICES."""
    for name in VISIBLE:
        environment.pop(name, None)
    environment[VISIBLE[0]] = ",".join(names)


@dataclass(frozen=True)
class AmdNode:
    """Describes a node with Instinct GPUs.

    Attributes:
        gpus: the devices of this job in ROCm's order, including integrated GPUs and display cards.
        installed: the number of Instinct devices of the node, including devices of other jobs.
        managed: the number of these that the driver lists.
        loaded: whether the driver amdgpu is loaded and shows its topology.
        devices: the directory of device files, usually ``/dev``.
    """

    gpus: tuple[AmdGpu, ...]
    installed: int
    managed: int
    loaded: bool
    devices: Path

    @classmethod
    def read(cls, nodes: Path, pci: Path, devices: Path) -> AmdNode | None:
        """Reads the node; returns None if it has no Instinct GPUs, such as a laptop with an integrated GPU and the same
        driver."""
        gpus = read_gpus(nodes)
        plugged = len(instinct_on_bus(pci))
        counted = sum(gpu.compute for gpu in gpus)
        if not counted and not plugged:
            return None
        others = sum(not _properties(folder / "properties") for folder in _numbered(nodes))
        return cls(gpus, max(plugged, counted + others), counted + others, nodes.is_dir(), devices)

    def visible(self, environment: Mapping[str, str] = os.environ) -> tuple[AmdGpu, ...]:
        """Returns the devices on which ranks can run, in HIP's order. The list ends before the first unusable device,
        because local rank n uses HIP's device n.
        """
        if not _may_open(self.devices / "kfd"):
            return ()
        return tuple(takewhile(self._usable, selected(self.gpus, environment)))

    def _usable(self, gpu: AmdGpu) -> bool:
        return gpu.compute and _may_open(self.devices / f"dri/renderD{gpu.render}")

    def named(self, environment: Mapping[str, str] = os.environ) -> int | None:
        """Returns the number of devices to which the user's variables limit the process; None without such
        variables."""
        # HIP ignores an empty variable, although users set it to hide all GPUs
        empty = environment.get("HIP_VISIBLE_DEVICES", environment.get("CUDA_VISIBLE_DEVICES"))
        counts = []
        for names in (environment.get("ROCR_VISIBLE_DEVICES"), _for_hip(environment) or empty):
            if names is not None and NO_DEVICES not in names:
                shown = list(takewhile(lambda name: name and not name.startswith("-"), names.split(",")))
                counts.append(len(shown))
        return min(counts, default=None)

    def why_not_visible(self, environment: Mapping[str, str], staff: str | None) -> tuple[str, str]:
        """Returns the reason why too few devices are visible, and the fix. ``staff`` is the fix if the node is faulty;
        None on a machine without Slurm."""
        if not self.loaded:
            return "the driver amdgpu is not loaded (/sys/class/kfd does not exist)", staff or "load the driver"
        kfd = self.devices / "kfd"
        if not kfd.exists():
            return (
                f"{kfd} does not exist",
                "in a container start it with apptainer --rocm, or docker --device /dev/kfd --device /dev/dri",
            )
        if not _may_open(kfd):
            return f"it may not open {kfd}", staff or "join the groups render and video"
        seen = selected(self.gpus, environment)
        if not_counted := next((gpu for gpu in seen if not gpu.compute), None):
            counted = ",".join(str(gpu.index) for gpu in self.gpus if gpu.compute)
            return (
                f"HIP's device {seen.index(not_counted)} is an integrated GPU or a display card "
                f"({not_counted.architecture})",
                f"set ROCR_VISIBLE_DEVICES={counted} and unset HIP_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES",
            )
        if closed := [gpu.render for gpu in seen if not self._usable(gpu)]:
            files = ", ".join(f"renderD{number}" for number in closed)
            return f"it may not open {files} in {self.devices}/dri", staff or "join the groups render and video"
        listed = sum(gpu.compute for gpu in self.gpus)
        names = [name for name in VISIBLE if name in environment]
        if listed == len(seen) or not names:
            return f"the driver amdgpu lists {listed}", staff or f"set cluster.gpus_per_node={listed}"
        text = " and ".join(f"{name}={environment[name]!r}" for name in names)
        if names[0] == VISIBLE[0] and len(names) > 1:
            fix = f"add 'unset {' '.join(names[1:])}' to cluster.setup"
            return f"{text} hide them: HIP counts within ROCR_VISIBLE_DEVICES", fix
        return f"{text} hide{'s' if len(names) == 1 else ''} them", f"unset {' '.join(names)}"


def _may_open(device: Path) -> bool:
    return device.exists() and os.access(device, os.R_OK | os.W_OK)


def instinct_on_bus(pci: Path) -> tuple[str, ...]:
    """Returns the addresses of the Instinct GPUs on the PCI bus, which shows them even without a driver."""
    if not pci.is_dir():
        return ()
    devices = [path for path in sorted(pci.iterdir()) if read_text(path / "vendor") == VENDOR]
    return tuple(path.name for path in devices if read_text(path / "device").lower() in _IDS)


_IDS = {f"0x{number:04x}" for number in _PRODUCTS}
