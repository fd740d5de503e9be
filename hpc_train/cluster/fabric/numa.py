"""The CPUs of a node: NUMA nodes, and which logical CPUs are one physical core."""

from __future__ import annotations

from pathlib import Path

from hpc_train.cluster.fabric.cpu_list import parse_cpu_list
from hpc_train.cluster.fabric.rdma import read_text


def numa_cpus(sysfs: Path) -> dict[int, tuple[int, ...]]:
    """The CPUs of each NUMA node; () for one that has memory only."""
    found: dict[int, tuple[int, ...]] = {}
    for path in (sysfs / "devices/system/node").glob("node[0-9]*"):
        number = path.name.removeprefix("node")
        if number.isdigit():
            found[int(number)] = _cpu_list(path / "cpulist")
    return dict(sorted(found.items()))


def nearest_with_cpus(sysfs: Path, node: int) -> int | None:
    """``node`` itself, or for one without CPUs (the memory of a GPU on Grace) the nearest that has some."""
    cpus = numa_cpus(sysfs)
    if cpus.get(node):
        return node
    distances = (read_text(sysfs / f"devices/system/node/node{node}/distance") or "").split()
    if len(distances) != len(cpus) or not all(text.isdigit() for text in distances):
        return None
    near = [(int(text), other) for text, other in zip(distances, cpus, strict=True) if cpus[other]]
    return min(near)[1] if near else None


def physical_cores(sysfs: Path) -> tuple[tuple[int, ...], ...]:
    """Logical CPUs that share a core, for each core; () where the kernel does not tell."""
    cores = set()
    for path in (sysfs / "devices/system/cpu").glob("cpu[0-9]*"):
        topology = path / "topology"
        siblings = _cpu_list(topology / "thread_siblings_list") or _cpu_list(topology / "core_cpus_list")
        if siblings:
            cores.add(siblings)
    return tuple(sorted(cores))


def near_cpus(sysfs: Path, device: Path) -> tuple[int | None, tuple[int, ...]]:
    """The NUMA node and the CPUs near a PCI device; where it says -1, as in virtual machines, those of its bridge.

    Args:
        device: the device's directory, links resolved.
    """
    for place in (device, *device.parents):
        number = read_text(place / "numa_node")
        if number is not None and number.isdigit():
            node = nearest_with_cpus(sysfs, int(number))
            return node, numa_cpus(sysfs).get(node, ()) if node is not None else ()
        cpus = _cpu_list(place / "local_cpulist") if number is not None and place != device else ()
        if cpus and not _everywhere(sysfs, cpus):
            return None, cpus
        if place == sysfs:
            break
    return None, ()


def _everywhere(sysfs: Path, cpus: tuple[int, ...]) -> bool:
    """Whether these are the CPUs of several NUMA nodes together, which is how the kernel lists them for no node."""
    nodes = [own for own in numa_cpus(sysfs).values() if own]
    return len(nodes) > 1 and set(cpus) >= set().union(*nodes)


def _cpu_list(path: Path) -> tuple[int, ...]:
    try:
        return parse_cpu_list(read_text(path) or "")
    except ValueError:
        return ()
