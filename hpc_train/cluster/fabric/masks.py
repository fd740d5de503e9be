"""The CPUs of each rank: the physical cores near its GPU, shared out among the ranks that have the same ones.

A mask is never empty, never wider than what the process may use, and no core is given twice. Where that cannot be had,
a rank is not bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_train.cluster.fabric.cpu_list import runs
from hpc_train.cluster.fabric.facts import Gpu, NodeFacts

Core = tuple[int, ...]


@dataclass(frozen=True)
class Mask:
    """The logical CPUs of the rank on ``gpu``; None leaves it unbound."""

    gpu: str
    cpus: tuple[int, ...] | None
    reason: str


def cpu_masks(facts: NodeFacts) -> tuple[Mask, ...]:
    """A mask for each GPU of the node, in their order."""
    cores = _cores(facts)
    usable = {gpu.name: _usable(gpu, facts) for gpu in facts.gpus}
    near = {name: tuple(core for core in cores if cpus.intersection(core)) for name, cpus in usable.items()}
    masks: dict[str, Mask] = {}
    for group in _sharing(near):
        for name, share in _share(group, near).items():
            masks[name] = _mask(name, share, usable[name], near[name])
    return tuple(masks[gpu.name] for gpu in facts.gpus)


def unknown_cores(facts: NodeFacts) -> tuple[str, ...]:
    """What is said where masks rest on how CPUs are numbered."""
    guessed = not facts.cores and any(mask.cpus for mask in cpu_masks(facts))
    return ("which CPUs are one physical core: taken from how they are numbered",) if guessed else ()


def _cores(facts: NodeFacts) -> tuple[Core, ...]:
    """Physical cores as the kernel tells them; else from how CPUs are numbered: where a GPU's CPUs are two runs of the
    same length, the second are the hyperthreads of the first. Wrong or not, no CPU is in two cores."""
    if facts.cores:
        return facts.cores
    cores: dict[int, Core] = {}
    for cpus in dict.fromkeys(gpu.cpus for gpu in facts.gpus):
        parts = runs(cpus)
        alike = len(parts) == 2 and len(parts[0]) == len(parts[1])
        for core in zip(*parts, strict=True) if alike else ((cpu,) for cpu in cpus):
            if not any(cpu in cores for cpu in core):
                cores |= dict.fromkeys(core, core)
    return tuple(sorted(set(cores.values())))


def _usable(gpu: Gpu, facts: NodeFacts) -> set[int]:
    return set(gpu.cpus) & set(facts.allowed) if facts.allowed else set(gpu.cpus)


def _sharing(near: Mapping[str, Sequence[Core]]) -> list[list[str]]:
    """GPUs in groups that have a core in common."""
    groups: list[tuple[set[Core], list[str]]] = []
    for name, own in near.items():
        cores, names = set(own), [name]
        for other in [group for group in groups if group[0] & cores]:
            groups.remove(other)
            cores |= other[0]
            names = other[1] + names
        groups.append((cores, names))
    return [names for _, names in groups]


def _share(group: Sequence[str], near: Mapping[str, Sequence[Core]]) -> dict[str, list[Core]]:
    """Contiguous shares of the group's cores, the smallest choice first; [] for all where somebody would get none."""
    free = sorted({core for name in group for core in near[name]})
    shares: dict[str, list[Core]] = {}
    waiting = sorted(group, key=lambda name: len(near[name]))
    for place, name in enumerate(waiting):
        mine = [core for core in free if core in near[name]]
        sharers = sum(bool(set(near[other]) & set(mine)) for other in waiting[place:])
        shares[name] = mine[: -(-len(mine) // max(1, sharers))]
        free = [core for core in free if core not in shares[name]]
    return shares if all(shares.values()) else {name: [] for name in group}


def _mask(gpu: str, share: Sequence[Core], usable: set[int], near: Sequence[Core]) -> Mask:
    cpus = tuple(sorted(cpu for core in share for cpu in core if cpu in usable))
    if cpus:
        return Mask(gpu, cpus, f"{len(share)} of the {len(near)} cores near it")
    if not near:
        return Mask(gpu, None, "the CPUs near it are not known, or not allowed")
    return Mask(gpu, None, "fewer cores than GPUs that share them: not bound")
