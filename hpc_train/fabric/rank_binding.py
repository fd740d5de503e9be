"""The CPUs that each local rank is bound to when it is forked, before CUDA starts and before loaders are forked.

NCCL keeps its threads within the mask, and memory of the loaders comes from the near NUMA node. Never wider than what
the job was given; the user's own binding of threads wins.

Which GPU each local rank gets, by the names that CUDA_VISIBLE_DEVICES takes: numbers, UUIDs, MIG slices.

The CPUs of each rank: the physical cores near its GPU, shared out among the ranks that have the same ones.

A mask is never empty, never wider than what the process may use, and no core is given twice. Where that cannot be had,
a rank is not bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hpc_train.errors import UserError
from hpc_train.fabric.facts import Gpu, NodeFacts, runs

BINDERS = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES")  # bind the threads of a process to CPUs of their own


@dataclass(frozen=True)
class Binding:
    """The logical CPUs of a local rank; None leaves it unbound. ``cores``: how many physical cores they are."""

    cpus: tuple[int, ...] | None
    cores: int
    reason: str


def bindings(facts: NodeFacts, ranks: int) -> tuple[Binding, ...]:
    """A binding for each of the ``ranks`` ranks of the node."""
    binder = next((setting for setting in facts.settings if setting.name in BINDERS), None)
    if binder is not None:
        return _unbound(ranks, f"{binder.name} is set by {binder.place}, which wins")
    gpus = [device.gpu for device in devices(facts)[:ranks]]
    return _near_gpus(facts, gpus, ranks) if facts.visible else _shares(facts, ranks)


def _near_gpus(facts: NodeFacts, gpus: Sequence[Gpu | None], ranks: int) -> tuple[Binding, ...]:
    known = [gpu for gpu in gpus if gpu is not None]
    if len(known) < ranks or len({gpu.index for gpu in known}) < ranks:
        return _unbound(ranks, "which GPU each rank has is not known")
    masks = {mask.gpu: mask for mask in cpu_masks(replace(facts, gpus=tuple(known)))}
    return tuple(_binding(facts, masks[gpu.name].cpus, masks[gpu.name].reason) for gpu in known)


def _shares(facts: NodeFacts, ranks: int) -> tuple[Binding, ...]:
    """Without GPUs: neighbouring cores for each rank. Only where all CPUs that are seen are the job's own."""
    if facts.allocated_cpus is None:
        return _unbound(ranks, "no GPU, and not on Slurm: other processes use the CPUs too")
    if facts.allocated_cpus < len(facts.allowed):
        return _unbound(ranks, f"Slurm gave {facts.allocated_cpus} CPUs and shows {len(facts.allowed)}")
    cores = _numbered_cores(facts)
    if len(cores) < ranks:
        return _unbound(ranks, f"{len(cores)} cores for {ranks} ranks")
    cuts = [len(cores) * rank // ranks for rank in range(ranks + 1)]
    return tuple(
        _binding(facts, sum(cores[start:end], ()), f"{end - start} of {len(cores)} cores")
        for start, end in pairwise(cuts)
    )


def _numbered_cores(facts: NodeFacts) -> list[Core]:
    """The allowed CPUs by physical core, NUMA node after NUMA node."""
    node_of = {cpu: number for number, cpus in enumerate(facts.numa) for cpu in cpus}
    allowed = set(facts.allowed)
    cores = [own for core in facts.cores if (own := tuple(cpu for cpu in core if cpu in allowed))]
    return sorted(cores, key=lambda core: (node_of.get(core[0], 0), core))


def _binding(facts: NodeFacts, cpus: tuple[int, ...] | None, reason: str) -> Binding:
    if cpus is None:
        return Binding(None, 0, reason)
    cores = sum(bool(set(core) & set(cpus)) for core in facts.cores)
    return Binding(tuple(sorted(cpus)), cores or len(cpus), reason)


def _unbound(ranks: int, reason: str) -> tuple[Binding, ...]:
    return (Binding(None, 0, reason),) * ranks


_SLICE = "MIG-"


@dataclass(frozen=True)
class Device:
    """The device of a local rank; ``gpu`` is None where it cannot be told which one it is or is a part of."""

    name: str
    gpu: Gpu | None

    @property
    def is_slice(self) -> bool:
        return self.name.startswith(_SLICE)


def devices(facts: NodeFacts) -> tuple[Device, ...]:
    """The visible devices of a node in the order of local rank."""
    return tuple(Device(name, _gpu(facts.gpus, name)) for name in facts.visible)


def refuse_slices_of_one_gpu(facts: NodeFacts, ranks: int) -> None:
    """Two ranks on one GPU cannot be connected by NCCL, whatever slices they have.

    Raises:
        UserError: that would be so for the first ``ranks`` devices.
    """
    slices = [device for device in devices(facts)[:ranks] if device.is_slice and device.gpu is not None]
    counts = Counter(device.gpu.name for device in slices if device.gpu is not None)
    for name, count in counts.items():
        if count > 1:
            raise UserError(
                f"{count} ranks would run on MIG slices of {name} of {facts.node}, and NCCL connects no two ranks on "
                "one GPU",
                where="CUDA_VISIBLE_DEVICES",
                fix="cluster.gpus_per_node=1 trains on one slice; slices of different GPUs, or whole GPUs, train "
                "together",
            )


def _gpu(gpus: Sequence[Gpu], name: str) -> Gpu | None:
    if name.isdigit():
        return gpus[int(name)] if int(name) < len(gpus) else None
    uuid = name.removeprefix(_SLICE).partition("/")[0]  # MIG-GPU-<uuid>/7/0 of drivers before 470
    found = [gpu for gpu in gpus if (gpu.uuid or "").startswith(uuid) or name in gpu.slices]
    return found[0] if len(found) == 1 else None


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
