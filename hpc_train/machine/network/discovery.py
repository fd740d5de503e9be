"""Discovers the hardware of a node from ``/sys`` and ``/proc``, and from the output of tools where those are hidden.

It covers GPUs, NICs, PCI distances, NUMA nodes, physical cores, and GPUDirect RDMA: whether NICs can read GPU memory,
according to the loaded kernel modules.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hpc_train.machine.amd_gpus import AmdGpu, read_gpus
from hpc_train.machine.network.facts import (
    XGMI,
    Gpu,
    GpuLink,
    Interface,
    Nic,
    NodeFacts,
    parse_cpu_list,
    read_limits,
    shared_memory,
)
from hpc_train.machine.network.rdma import read_rdma, read_text

_NVIDIA = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")  # with and without a display output
_AZURE_CHASSIS = "7783-7084-3265-9085-8269-3286-77"
_VENDORS = {"amazon ec2": "aws", "google": "gcp", "google compute engine": "gcp", "oraclecloud.com": "oci"}


def discover(sysfs: Path = Path("/sys"), proc: Path = Path("/proc")) -> NodeFacts:
    """Returns what ``sysfs`` and ``proc`` show of this node."""
    seen = read_tree(sysfs, proc)
    return replace(
        seen,
        node=socket.gethostname(),
        allowed=tuple(sorted(os.sched_getaffinity(0))),
        limits=replace(seen.limits, shared_memory=shared_memory()),
    )


def print_matrix() -> str | None:
    """Returns the output of ``nvidia-smi topo -m``; None without the tool."""
    try:
        printed = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if printed.returncode == 0:
        return printed.stdout
    return None


def read_tree(sysfs: Path, proc: Path) -> NodeFacts:
    """Returns the facts of a node from a ``/sys`` and a ``/proc``, or from recorded copies."""
    amd = tuple(gpu for gpu in read_gpus(sysfs / "class/kfd/kfd/topology/nodes") if gpu.compute)
    gpus = _gpus(sysfs, proc) or tuple(_amd_gpu(sysfs, gpu) for gpu in amd)
    nics = read_rdma(sysfs)
    unknown = [f"the CPUs near {gpu.name}" for gpu in gpus if not gpu.cpus]
    fabric = tuple(_xgmi(amd, gpus))
    pairs = {(link.a, link.b) for link in fabric}
    links = fabric + tuple(link for link in _links(sysfs, gpus, nics) if (link.a, link.b) not in pairs)
    return NodeFacts(
        gpus=gpus,
        nics=nics,
        interfaces=_interfaces(sysfs, proc),
        links=links,
        cores=physical_cores(sysfs),
        numa=tuple(cpus for cpus in numa_cpus(sysfs).values() if cpus),
        site=_site(sysfs),
        unknown=tuple(unknown),
        limits=read_limits(proc),
        allowed=_allowed(proc),
        gpu_direct=read_gpu_direct(sysfs, proc),
    )


def recorded_tree(root: Path) -> tuple[Path, Path]:
    """Returns the ``/sys`` and ``/proc`` of a recording of a whole machine, or of ``/sys`` or a part of it."""
    is_root = (root / "sys").is_dir()
    return root / "sys" if is_root else root, root / "proc"


def merge(seen: NodeFacts, matrix: NodeFacts) -> NodeFacts:
    """Merges the facts ``seen`` in ``/sys`` with those of the ``matrix``; contradictory facts are dropped as
    unknown.
    """
    unknown = [*seen.unknown, *matrix.unknown]
    if seen.gpus and matrix.gpus and len(seen.gpus) != len(matrix.gpus):  # they cannot be matched
        unknown.append(f"the GPUs: /sys shows {len(seen.gpus)}, the matrix {len(matrix.gpus)}")
        return replace(seen, unknown=tuple(unknown))
    matrix = _without_nameless(matrix) if seen.nics else matrix
    by_index = {gpu.index: gpu for gpu in seen.gpus}
    gpus = tuple(_merged_gpu(by_index.pop(gpu.index, None), gpu) for gpu in matrix.gpus) + tuple(by_index.values())
    filled = {f"the CPUs near {gpu.name}" for gpu in gpus if gpu.cpus}
    names = {nic.name for nic in seen.nics}
    nics = (*seen.nics, *(nic for nic in matrix.nics if nic.name not in names))
    links, doubts = _merged_links(seen, matrix)
    return replace(
        seen,
        gpus=tuple(sorted(gpus, key=lambda gpu: gpu.index)),
        nics=nics,
        links=links,
        unknown=tuple(note for note in (*unknown, *doubts) if note not in filled),
    )


def _without_nameless(matrix: NodeFacts) -> NodeFacts:
    """Removes NICs that the matrix only numbers, because they cannot be matched with those in ``/sys``."""
    gone = {nic.name for nic in matrix.nics if nic.kind is None and re.fullmatch(r"NIC\d+", nic.name)}
    return replace(
        matrix,
        nics=tuple(nic for nic in matrix.nics if nic.name not in gone),
        links=tuple(link for link in matrix.links if not {link.a, link.b} & gone),
    )


def _merged_gpu(seen: Gpu | None, matrix: Gpu) -> Gpu:
    if seen is None:
        return matrix
    return replace(seen, cpus=seen.cpus or matrix.cpus, numa_nodes=seen.numa_nodes or matrix.numa_nodes)


def _merged_links(seen: NodeFacts, matrix: NodeFacts) -> tuple[tuple[GpuLink, ...], list[str]]:
    """Merges links. Only the matrix shows NVLinks; PCI path types must agree, up to the counting of bridges."""
    links = {frozenset((link.a, link.b)): link for link in seen.links}
    doubts = []
    for link in matrix.links:
        pair = frozenset((link.a, link.b))
        other = links.get(pair)
        if other is None or link.path_type.startswith("NV"):
            links[pair] = link
        elif (other.path_type == "SYS") != (link.path_type == "SYS"):
            doubts.append(
                f"the link of {link.a} and {link.b} is {other.path_type} in /sys and {link.path_type} in the matrix"
            )
            del links[pair]
    return tuple(links.values()), doubts


def _gpus(sysfs: Path, proc: Path) -> tuple[Gpu, ...]:
    addresses = [
        path.name
        for path in sorted((sysfs / "bus/pci/devices").glob("*"))
        if read_text(path / "vendor") == _NVIDIA and (read_text(path / "class") or "").startswith(_GPU_CLASSES)
    ]
    if not addresses:  # a container may show the driver but not the bus
        addresses = sorted(path.name for path in (proc / "driver/nvidia/gpus").glob("*"))
    return tuple(_gpu(sysfs, proc, index, address) for index, address in enumerate(addresses))


def _gpu(sysfs: Path, proc: Path, index: int, address: str) -> Gpu:
    device = sysfs / "bus/pci/devices" / address
    node, cpus = near_cpus(sysfs, device.resolve()) if device.exists() else (None, ())
    information = read_text(proc / "driver/nvidia/gpus" / address / "information") or ""
    facts = dict(re.findall(r"^([A-Za-z ]+):\s*(.+?)\s*$", information, flags=re.MULTILINE))
    return Gpu(index, address, facts.get("Model"), facts.get("GPU UUID"), () if node is None else (node,), cpus)


def _amd_gpu(sysfs: Path, gpu: AmdGpu) -> Gpu:
    device = sysfs / "bus/pci/devices" / gpu.pci
    node, cpus = near_cpus(sysfs, device.resolve()) if device.exists() else (None, ())
    return Gpu(gpu.index, gpu.pci, gpu.model, gpu.uuid, () if node is None else (node,), cpus)


def _xgmi(amd: Sequence[AmdGpu], gpus: Sequence[Gpu]) -> Iterator[GpuLink]:
    """Yields the links over Infinity Fabric. ``gpus`` are those of ``amd``, or NVIDIA's."""
    names = {gpu.index: gpu.name for gpu in gpus if gpu.amd}
    for i, a in enumerate(amd if names else ()):
        for b in amd[:i]:
            if a.node in b.peers or b.node in a.peers:
                yield GpuLink(names[b.index], names[a.index], XGMI)


def _allowed(proc: Path) -> tuple[int, ...]:
    """Returns the CPUs allowed in ``/proc/self/status``, of this process or of the one that made the recording."""
    match = re.search(r"^Cpus_allowed_list:\s*(\S+)$", read_text(proc / "self/status") or "", re.MULTILINE)
    try:
        if match:
            return parse_cpu_list(match[1])
        return ()
    except ValueError:
        return ()


def _links(sysfs: Path, gpus: Iterable[Gpu], nics: Iterable[Nic]) -> Iterable[GpuLink]:
    places = [(gpu.name, gpu.pci, gpu.numa_nodes[0] if gpu.numa_nodes else None) for gpu in gpus]
    places += [(nic.name, nic.pci, nic.numa_node) for nic in nics]
    paths = {name: device_path(sysfs, pci) if pci else () for name, pci, _ in places}
    for i, (a, _, a_node) in enumerate(places):
        for b, _, b_node in places[:i]:
            same = None if a_node is None or b_node is None else a_node == b_node
            if kind := path_type(paths[a], paths[b], same):
                yield GpuLink(b, a, kind)


def _interfaces(sysfs: Path, proc: Path) -> tuple[Interface, ...]:
    routes = (read_text(proc / "net/route") or "").splitlines()[1:]
    first = [fields[0] for line in routes if len(fields := line.split()) > 1 and fields[1] == "00000000"]
    default = {name for interface in first for name in (interface, *_below(sysfs, interface))}
    interfaces = []
    for path in sorted((sysfs / "class/net").glob("*")):
        if path.name == "lo" or not (path / "device").exists():  # virtual interfaces, e.g. container bridges
            continue
        speed = read_text(path / "speed")
        gbps = int(speed) / 1000 if speed is not None and speed.isdigit() else None
        interfaces.append(Interface(path.name, read_text(path / "operstate") == "up", gbps, path.name in default))
    return tuple(interfaces)


def _below(sysfs: Path, interface: str) -> Iterator[str]:
    """Yields the interfaces that a bond, VLAN or bridge consists of."""
    for path in (sysfs / "class/net" / interface).glob("lower_*"):
        name = path.name.removeprefix("lower_")
        yield name
        yield from _below(sysfs, name)


def _site(sysfs: Path) -> str | None:
    firmware = sysfs / "class/dmi/id"
    if read_text(firmware / "chassis_asset_tag") == _AZURE_CHASSIS:
        return "azure"
    for name in ("sys_vendor", "product_name", "chassis_asset_tag"):
        if site := _VENDORS.get((read_text(firmware / name) or "").lower()):
            return site
    return None


ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def device_path(sysfs: Path, address: str) -> tuple[str, ...]:
    """Returns the host bridge and the bridges down to a device, the device last; () if it does not exist.

    ``("pci0000:80", "0000:80:01.1", "0000:81:00.0")``: host bridge, root port, device.
    """
    link = sysfs / "bus/pci/devices" / address
    if not link.exists() and not link.is_symlink():  # a copy may contain the link without its target
        return ()
    parts = link.resolve().parts
    start = next((i for i, part in enumerate(parts) if re.fullmatch(r"pci[0-9a-f]{4,}:[0-9a-f]{2}", part)), None)
    if start is None:
        return ()
    return (parts[start], *[part for part in parts[start + 1 :] if ADDRESS.fullmatch(part)])


def path_type(a: tuple[str, ...], b: tuple[str, ...], same_numa: bool | None) -> str | None:
    """Returns nvidia-smi's path type between two devices, given their ``device_path``.

    PIX: below one switch. PXB: over several switches below one root port. PHB: through one host bridge. NODE: between
    host bridges of a NUMA node. SYS: between NUMA nodes. None if the paths, or for the last two the NUMA nodes, are
    unknown.
    """
    if not a or not b:
        return None
    common = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        common += 1
    if common == 0:
        if same_numa is None:
            return None
        if same_numa:
            return "NODE"
        return "SYS"
    if common == 1:
        return "PHB"
    below = max(len(a), len(b)) - common  # 2: a port of the common switch and the device
    if below <= 2:
        return "PIX"
    return "PXB"


def numa_cpus(sysfs: Path) -> dict[int, tuple[int, ...]]:
    """Returns the CPUs of each NUMA node; () for a node with memory only."""
    nodes: dict[int, tuple[int, ...]] = {}
    for path in (sysfs / "devices/system/node").glob("node[0-9]*"):
        number = path.name.removeprefix("node")
        if number.isdigit():
            nodes[int(number)] = _cpu_list(path / "cpulist")
    return dict(sorted(nodes.items()))


def nearest_with_cpus(sysfs: Path, node: int) -> int | None:
    """Returns ``node``, or if it has no CPUs (GPU memory on Grace) the nearest node that has some."""
    cpus = numa_cpus(sysfs)
    if cpus.get(node):
        return node
    distances = (read_text(sysfs / f"devices/system/node/node{node}/distance") or "").split()
    if len(distances) != len(cpus) or not all(text.isdigit() for text in distances):
        return None
    near = [(int(text), other) for text, other in zip(distances, cpus, strict=True) if cpus[other]]
    if near:
        return min(near)[1]
    return None


def physical_cores(sysfs: Path) -> tuple[tuple[int, ...], ...]:
    """Returns the logical CPUs of each physical core; () if the kernel does not show them."""
    cores = set()
    for path in (sysfs / "devices/system/cpu").glob("cpu[0-9]*"):
        topology = path / "topology"
        siblings = _cpu_list(topology / "thread_siblings_list") or _cpu_list(topology / "core_cpus_list")
        if siblings:
            cores.add(siblings)
    return tuple(sorted(cores))


def near_cpus(sysfs: Path, device: Path) -> tuple[int | None, tuple[int, ...]]:
    """Returns the NUMA node and CPUs near a PCI device, or if it reports -1 (virtual machines) those of its bridge.

    Args:
        device: the device's directory with links resolved.
    """
    for place in (device, *device.parents):
        number = read_text(place / "numa_node")
        if number is not None and number.isdigit():
            node = nearest_with_cpus(sysfs, int(number))
            return node, numa_cpus(sysfs).get(node, ()) if node is not None else ()
        if number is not None and place != device:
            cpus = _cpu_list(place / "local_cpulist")
        else:
            cpus = ()
        if cpus and not _everywhere(sysfs, cpus):
            return None, cpus
        if place == sysfs:
            break
    return None, ()


def _everywhere(sysfs: Path, cpus: tuple[int, ...]) -> bool:
    """Returns whether ``cpus`` covers several NUMA nodes, which is how the kernel lists the CPUs of no particular
    node.
    """
    nodes = [node_cpus for node_cpus in numa_cpus(sysfs).values() if node_cpus]
    return len(nodes) > 1 and set(cpus) >= set().union(*nodes)


def _cpu_list(path: Path) -> tuple[int, ...]:
    try:
        return parse_cpu_list(read_text(path) or "")
    except ValueError:
        return ()


MODULES = ("nvidia_peermem", "nv_peer_mem", "efa_nv_peermem")  # current, before driver 470, Amazon's
# the places where RCCL looks for AMD's registration with the InfiniBand core (net_ib.cc of ROCm 6)
AMD_PEERS = ("kernel/mm/memory_peers/amdkfd", "kernel/memory_peers/amdkfd", "memory_peers/amdkfd")
DMA_BUF_KERNEL = (5, 12)  # with NVIDIA's open kernel modules (GPUDirect RDMA's documentation)
NONE = "none"


def read_gpu_direct(sysfs: Path, proc: Path) -> str | None:
    """Returns the module that enables it, ``DMA-BUF``, or ``none``; None if no driver is visible."""
    loaded = next((name for name in MODULES if (sysfs / "module" / name).is_dir()), None)
    if loaded is not None:
        return loaded
    if any((sysfs / path / "version").exists() for path in AMD_PEERS):
        return "amdkfd"
    driver = read_text(proc / "driver/nvidia/version") or ""
    kernel = re.match(r"(\d+)\.(\d+)", read_text(proc / "sys/kernel/osrelease") or "")
    if "Open Kernel Module" in driver and kernel and tuple(map(int, kernel.groups())) >= DMA_BUF_KERNEL:
        return "DMA-BUF"
    if (sysfs / "module/nvidia").is_dir():
        return NONE
    return None
