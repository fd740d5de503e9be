"""Discovers the hardware of a node from ``/sys`` and ``/proc`` or, if these are hidden, from the output of tools.

It covers GPUs, NICs, PCI distances, NUMA nodes, physical cores, and GPUDirect RDMA: whether NICs can read GPU memory,
according to the loaded kernel modules.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from hpc_train.machine.amd_gpus import read_gpus
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
from hpc_train.machine.network.rdma import read_rdma
from hpc_train.machine.sysfs import nvidia_gpus, read_number, read_text

_AZURE_CHASSIS = "7783-7084-3265-9085-8269-3286-77"
_VENDORS = {"amazon ec2": "aws", "google": "gcp", "google compute engine": "gcp", "oraclecloud.com": "oci"}


def discover(sysfs: Path = Path("/sys"), proc: Path = Path("/proc")) -> NodeFacts:
    seen = read_tree(sysfs, proc)
    return replace(
        seen,
        node=socket.gethostname(),
        allowed=tuple(sorted(os.sched_getaffinity(0))),
        limits=replace(seen.limits, shared_memory=shared_memory()),
    )


def read_tree(sysfs: Path, proc: Path) -> NodeFacts:
    """Returns the facts of a node from a ``/sys`` and a ``/proc``, or from recorded copies."""
    amd = tuple(gpu for gpu in read_gpus(sysfs / "class/kfd/kfd/topology/nodes") if gpu.compute)
    gpus = _gpus(sysfs, proc)
    fabric = []
    if not gpus:
        gpus = tuple(_gpu(sysfs, gpu.index, gpu.pci, gpu.model, gpu.uuid) for gpu in amd)
        for number, gpu in enumerate(amd):
            for other in amd[:number]:
                if other.node in gpu.peers or gpu.node in other.peers:
                    fabric.append(GpuLink(f"GPU{other.index}", f"GPU{gpu.index}", XGMI))
    nics = read_rdma(sysfs)
    pairs = {(link.a, link.b) for link in fabric}
    # the mask of this process, or of the process that made the recording
    allowed = re.search(r"^Cpus_allowed_list:\s*(\S+)$", read_text(proc / "self/status"), re.MULTILINE)
    return NodeFacts(
        gpus=gpus,
        nics=nics,
        interfaces=_interfaces(sysfs, proc),
        links=(*fabric, *(link for link in _links(sysfs, gpus, nics) if (link.a, link.b) not in pairs)),
        cores=physical_cores(sysfs),
        numa=tuple(cpus for cpus in numa_cpus(sysfs).values() if cpus),
        site=_site(sysfs),
        unknown=tuple(f"the CPUs near {gpu.name}" for gpu in gpus if not gpu.cpus),
        limits=read_limits(proc),
        allowed=_cpu_list(allowed[1]) if allowed else (),
        gpu_direct=read_gpu_direct(sysfs, proc),
    )


def recorded_tree(root: Path) -> tuple[Path, Path]:
    """Returns the ``/sys`` and ``/proc`` of a recording of a whole machine, or of ``/sys`` or a part of it."""
    is_root = (root / "sys").is_dir()
    return root / "sys" if is_root else root, root / "proc"


def merge(seen: NodeFacts, matrix: NodeFacts) -> NodeFacts:
    """Merges the facts ``seen`` in ``/sys`` with the facts of the ``matrix``; contradictory facts become unknown."""
    unknown = [*seen.unknown, *matrix.unknown]
    if seen.gpus and matrix.gpus and len(seen.gpus) != len(matrix.gpus):  # the GPUs cannot be matched
        unknown.append(f"the GPUs: /sys shows {len(seen.gpus)}, the matrix {len(matrix.gpus)}")
        return replace(seen, unknown=tuple(unknown))
    gpus = {gpu.index: gpu for gpu in seen.gpus}
    for gpu in matrix.gpus:
        known = gpus.get(gpu.index, gpu)
        cpus = known.cpus or gpu.cpus
        gpus[gpu.index] = replace(known, cpus=cpus, numa_nodes=known.numa_nodes or gpu.numa_nodes)
    nics = {nic.name: nic for nic in seen.nics}
    nameless = set()
    for nic in matrix.nics:
        # a NIC that has only a number in the matrix cannot be matched with the NICs in /sys
        if seen.nics and nic.kind is None and re.fullmatch(r"NIC\d+", nic.name):
            nameless.add(nic.name)
        else:
            nics.setdefault(nic.name, nic)
    links = {frozenset((link.a, link.b)): link for link in seen.links}
    for link in matrix.links:
        pair = frozenset((link.a, link.b))
        other = links.get(pair)
        if pair & nameless:
            continue
        if other is None or link.path_type.startswith("NV"):  # only the matrix shows NVLinks
            links[pair] = link
        elif (other.path_type == "SYS") != (link.path_type == "SYS"):  # the other types depend on counting bridges
            names = f"{link.a} and {link.b}"
            unknown.append(f"the link of {names} is {other.path_type} in /sys and {link.path_type} in the matrix")
            del links[pair]
    filled = {f"the CPUs near {gpu.name}" for gpu in gpus.values() if gpu.cpus}
    return replace(
        seen,
        gpus=tuple(gpus[index] for index in sorted(gpus)),
        nics=tuple(nics.values()),
        links=tuple(links.values()),
        unknown=tuple(note for note in unknown if note not in filled),
    )


def _gpus(sysfs: Path, proc: Path) -> tuple[Gpu, ...]:
    addresses = [device.name for device in nvidia_gpus(sysfs / "bus/pci/devices")]
    if not addresses:  # a container may show the driver but hide the PCI bus
        addresses = sorted(path.name for path in (proc / "driver/nvidia/gpus").glob("*"))
    gpus = []
    for index, address in enumerate(addresses):
        information = read_text(proc / "driver/nvidia/gpus" / address / "information")
        facts = dict(re.findall(r"^([A-Za-z ]+):\s*(.+?)\s*$", information, flags=re.MULTILINE))
        gpus.append(_gpu(sysfs, index, address, facts.get("Model"), facts.get("GPU UUID")))
    return tuple(gpus)


def _gpu(sysfs: Path, index: int, address: str, model: str | None, uuid: str | None) -> Gpu:
    device = sysfs / "bus/pci/devices" / address
    node, cpus = near_cpus(sysfs, device.resolve()) if device.exists() else (None, ())
    return Gpu(index, address, model, uuid, () if node is None else (node,), cpus)


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
    routes = read_text(proc / "net/route").splitlines()[1:]
    first = [fields[0] for line in routes if len(fields := line.split()) > 1 and fields[1] == "00000000"]
    default = {name for interface in first for name in (interface, *_below(sysfs, interface))}
    interfaces = []
    for path in sorted((sysfs / "class/net").glob("*")):
        if path.name == "lo" or not (path / "device").exists():  # virtual interfaces, e.g. container bridges
            continue
        speed = read_number(path / "speed")
        gbps = None if speed is None else speed / 1000
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
        if site := _VENDORS.get(read_text(firmware / name).lower()):
            return site
    return None


ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def device_path(sysfs: Path, address: str) -> tuple[str, ...]:
    """Returns the path of PCI addresses from the host bridge down to the device; () if the device does not exist.

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
            nodes[int(number)] = _cpu_list(read_text(path / "cpulist"))
    return dict(sorted(nodes.items()))


def nearest_with_cpus(sysfs: Path, node: int) -> int | None:
    """Returns ``node`` or, if it has no CPUs (GPU memory on Grace), the nearest node with CPUs; None if unknown."""
    cpus = numa_cpus(sysfs)
    if cpus.get(node):
        return node
    distances = read_text(sysfs / f"devices/system/node/node{node}/distance").split()
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
        siblings = _cpu_list(read_text(topology / "thread_siblings_list") or read_text(topology / "core_cpus_list"))
        if siblings:
            cores.add(siblings)
    return tuple(sorted(cores))


def near_cpus(sysfs: Path, device: Path) -> tuple[int | None, tuple[int, ...]]:
    """Returns the NUMA node and the CPUs near a PCI device. If the device reports node -1 (virtual machines), returns
    the node and CPUs of its bridge. ``device`` is the device's directory with links resolved."""
    nodes = numa_cpus(sysfs)
    for place in (device, *device.parents):
        number = read_text(place / "numa_node")
        if number.isdigit():
            node = nearest_with_cpus(sysfs, int(number))
            return node, () if node is None else nodes.get(node, ())
        if number and place != device:
            cpus = _cpu_list(read_text(place / "local_cpulist"))
            # for a device that belongs to no particular node, the kernel lists the CPUs of all nodes
            everywhere = sum(map(bool, nodes.values())) > 1 and set(cpus) >= set().union(*nodes.values())
            if cpus and not everywhere:
                return None, cpus
        if place == sysfs:
            break
    return None, ()


def _cpu_list(text: str) -> tuple[int, ...]:
    try:
        return parse_cpu_list(text)
    except ValueError:
        return ()


MODULES = ("nvidia_peermem", "nv_peer_mem", "efa_nv_peermem")  # the current name, before driver 470, and on AWS
# the places where RCCL looks for AMD's registration with the InfiniBand core (net_ib.cc of ROCm 6)
AMD_PEERS = ("kernel/mm/memory_peers/amdkfd", "kernel/memory_peers/amdkfd", "memory_peers/amdkfd")
DMA_BUF_KERNEL = (5, 12)  # with NVIDIA's open kernel modules (documentation of GPUDirect RDMA)
NONE = "none"


def read_gpu_direct(sysfs: Path, proc: Path) -> str | None:
    """Returns the kernel module that enables GPUDirect RDMA, ``DMA-BUF``, or ``none``; None if no driver is visible."""
    loaded = next((name for name in MODULES if (sysfs / "module" / name).is_dir()), None)
    if loaded is not None:
        return loaded
    if any((sysfs / path / "version").exists() for path in AMD_PEERS):
        return "amdkfd"
    driver = read_text(proc / "driver/nvidia/version")
    kernel = re.match(r"(\d+)\.(\d+)", read_text(proc / "sys/kernel/osrelease"))
    if "Open Kernel Module" in driver and kernel and tuple(map(int, kernel.groups())) >= DMA_BUF_KERNEL:
        return "DMA-BUF"
    if (sysfs / "module/nvidia").is_dir():
        return NONE
    return None
