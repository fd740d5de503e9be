"""Finds out what a node is made of: from ``/sys`` and ``/proc``, and from what tools printed where those are silent."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from hpc_train.cluster.fabric.facts import Gpu, Interface, Link, Nic, NodeFacts
from hpc_train.cluster.fabric.matrix import parse_matrix
from hpc_train.cluster.fabric.numa import near_cpus, numa_cpus, physical_cores
from hpc_train.cluster.fabric.pci import device_path, way_between
from hpc_train.cluster.fabric.rdma import read_rdma, read_text

_NVIDIA = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")  # with a display output, and without
_AZURE_CHASSIS = "7783-7084-3265-9085-8269-3286-77"
_VENDORS = {"amazon ec2": "aws", "google": "gcp", "google compute engine": "gcp", "oraclecloud.com": "oci"}


def discover(sysfs: Path = Path("/sys"), proc: Path = Path("/proc"), matrix: str | None = None) -> NodeFacts:
    """What ``sysfs`` and ``proc`` show of this node, with the gaps filled from ``matrix`` (``nvidia-smi topo -m``)."""
    seen = read_tree(sysfs, proc)
    seen = replace(seen, node=socket.gethostname(), allowed=tuple(sorted(os.sched_getaffinity(0))))
    return seen if matrix is None else merge(seen, parse_matrix(matrix))


def print_matrix() -> str | None:
    """What ``nvidia-smi topo -m`` prints here; None where there is no such tool."""
    try:
        printed = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return printed.stdout if printed.returncode == 0 else None


def read_tree(sysfs: Path, proc: Path) -> NodeFacts:
    """What a ``/sys`` and a ``/proc``, or recorded copies of them, show of a node."""
    gpus = _gpus(sysfs, proc)
    nics = read_rdma(sysfs)
    unknown = [f"the CPUs near {gpu.name}" for gpu in gpus if not gpu.cpus]
    links = tuple(_links(sysfs, gpus, nics))
    return NodeFacts(
        gpus=gpus,
        nics=nics,
        interfaces=_interfaces(sysfs, proc),
        links=links,
        cores=physical_cores(sysfs),
        numa=tuple(cpus for cpus in numa_cpus(sysfs).values() if cpus),
        site=_site(sysfs),
        unknown=tuple(unknown),
    )


def recorded_tree(root: Path) -> tuple[Path, Path]:
    """What stands for ``/sys`` and for ``/proc`` in a recording: of a whole machine, or of ``/sys`` or a part of it."""
    whole = (root / "sys").is_dir()
    return root / "sys" if whole else root, root / "proc"


def merge(seen: NodeFacts, told: NodeFacts) -> NodeFacts:
    """``seen`` in ``/sys`` with what the matrix ``told`` besides; where they contradict each other, neither counts."""
    unknown = [*seen.unknown, *told.unknown]
    if seen.gpus and told.gpus and len(seen.gpus) != len(told.gpus):
        unknown.append(f"the GPUs: /sys shows {len(seen.gpus)}, the matrix {len(told.gpus)}")
    by_index = {gpu.index: gpu for gpu in seen.gpus}
    gpus = tuple(_merged_gpu(by_index.pop(gpu.index, None), gpu) for gpu in told.gpus) + tuple(by_index.values())
    filled = {f"the CPUs near {gpu.name}" for gpu in gpus if gpu.cpus}
    names = {nic.name for nic in seen.nics}
    nics = (*seen.nics, *(nic for nic in told.nics if nic.name not in names))
    links, doubts = _merged_links(seen, told)
    return replace(
        seen,
        gpus=tuple(sorted(gpus, key=lambda gpu: gpu.index)),
        nics=nics,
        links=links,
        unknown=tuple(note for note in (*unknown, *doubts) if note not in filled),
    )


def _merged_gpu(seen: Gpu | None, told: Gpu) -> Gpu:
    if seen is None:
        return told
    return replace(seen, cpus=seen.cpus or told.cpus, numa_nodes=seen.numa_nodes or told.numa_nodes)


def _merged_links(seen: NodeFacts, told: NodeFacts) -> tuple[tuple[Link, ...], list[str]]:
    """NVLinks are only in the matrix; a way over PCI that both know must be the same, up to how near bridges count."""
    known = {frozenset((link.a, link.b)): link for link in seen.links}
    doubts = []
    for link in told.links:
        pair = frozenset((link.a, link.b))
        other = known.get(pair)
        if other is None or link.way.startswith("NV"):
            known[pair] = link
        elif (other.way == "SYS") != (link.way == "SYS"):
            doubts.append(f"the link of {link.a} and {link.b}: {other.way} in /sys, {link.way} in the matrix")
            del known[pair]
    return tuple(known.values()), doubts


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
    told = read_text(proc / "driver/nvidia/gpus" / address / "information") or ""
    facts = dict(re.findall(r"^([A-Za-z ]+):\s*(.+?)\s*$", told, flags=re.MULTILINE))
    return Gpu(index, address, facts.get("Model"), facts.get("GPU UUID"), () if node is None else (node,), cpus)


def _links(sysfs: Path, gpus: Iterable[Gpu], nics: Iterable[Nic]) -> Iterable[Link]:
    places = [(gpu.name, gpu.pci, gpu.numa_nodes[0] if gpu.numa_nodes else None) for gpu in gpus]
    places += [(nic.name, nic.pci, nic.numa_node) for nic in nics]
    paths = {name: device_path(sysfs, pci) if pci else () for name, pci, _ in places}
    for i, (a, _, a_node) in enumerate(places):
        for b, _, b_node in places[:i]:
            same = None if a_node is None or b_node is None else a_node == b_node
            if way := way_between(paths[a], paths[b], same):
                yield Link(b, a, way)


def _interfaces(sysfs: Path, proc: Path) -> tuple[Interface, ...]:
    routes = (read_text(proc / "net/route") or "").splitlines()[1:]
    default = {fields[0] for line in routes if len(fields := line.split()) > 1 and fields[1] == "00000000"}
    found = []
    for path in sorted((sysfs / "class/net").glob("*")):
        if path.name == "lo" or not (path / "device").exists():  # virtual: bridges of containers and the like
            continue
        speed = read_text(path / "speed")
        gbps = int(speed) / 1000 if speed is not None and speed.isdigit() else None
        found.append(Interface(path.name, read_text(path / "operstate") == "up", gbps, path.name in default))
    return tuple(found)


def _site(sysfs: Path) -> str | None:
    firmware = sysfs / "class/dmi/id"
    if read_text(firmware / "chassis_asset_tag") == _AZURE_CHASSIS:
        return "azure"
    for name in ("sys_vendor", "product_name", "chassis_asset_tag"):
        if site := _VENDORS.get((read_text(firmware / name) or "").lower()):
            return site
    return None
