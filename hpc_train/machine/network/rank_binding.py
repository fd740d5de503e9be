"""Binds each local rank to CPUs near its GPU when it is forked, before CUDA and loaders start.

NCCL keeps its threads within the affinity mask, and loaders allocate memory on the near NUMA node. The mask of a rank
is its share of the physical cores near its GPU: never empty, never wider than what the process may use, and without
cores of other ranks; if that is impossible, the rank is not bound. The user's own thread binding takes precedence.
Devices are named as in CUDA_VISIBLE_DEVICES: numbers, UUIDs, MIG slices; AMD's as in ROCR_VISIBLE_DEVICES.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hpc_train.errors import UserError
from hpc_train.machine.network.facts import Gpu, NodeFacts, runs

BINDERS = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES")  # variables that bind the threads of a process to CPUs


@dataclass(frozen=True)
class Binding:
    """Holds the logical CPUs of a local rank; None leaves it unbound. ``cores`` is the number of physical cores."""

    cpus: tuple[int, ...] | None
    cores: int
    reason: str


def bindings(facts: NodeFacts, ranks: int) -> tuple[Binding, ...]:
    """Returns a binding for each of the node's ``ranks`` ranks."""
    binder = next((setting for setting in facts.settings if setting.name in BINDERS), None)
    if binder is not None:
        return _unbound(ranks, f"{binder.name} is set by {binder.source}, which takes precedence")
    gpus = [device.gpu for device in devices(facts)[:ranks]]
    if facts.visible:
        return _near_gpus(facts, gpus, ranks)
    return _shares(facts, ranks)


def _near_gpus(facts: NodeFacts, gpus: Sequence[Gpu | None], ranks: int) -> tuple[Binding, ...]:
    known_gpus = [gpu for gpu in gpus if gpu is not None]
    if len(known_gpus) < ranks or len({gpu.index for gpu in known_gpus}) < ranks:
        return _unbound(ranks, "the GPU of each rank is unknown")
    masks = {mask.gpu: mask for mask in cpu_masks(replace(facts, gpus=tuple(known_gpus)))}
    return tuple(_binding(facts, masks[gpu.name].cpus, masks[gpu.name].reason) for gpu in known_gpus)


def _shares(facts: NodeFacts, ranks: int) -> tuple[Binding, ...]:
    """Gives each rank neighboring cores on a node without GPUs, but only if all visible CPUs belong to the job."""
    if facts.allocated_cpus is None:
        return _unbound(ranks, "there is no GPU and no Slurm job, so other processes may use the CPUs")
    if facts.allocated_cpus < len(facts.allowed):
        return _unbound(ranks, f"Slurm allocated {facts.allocated_cpus} CPUs but {len(facts.allowed)} are visible")
    cores = _numbered_cores(facts)
    if len(cores) < ranks:
        return _unbound(ranks, f"{len(cores)} cores are too few for {ranks} ranks")
    cuts = [len(cores) * rank // ranks for rank in range(ranks + 1)]
    return tuple(
        _binding(facts, sum(cores[start:end], ()), f"{end - start} of {len(cores)} cores")
        for start, end in pairwise(cuts)
    )


def _numbered_cores(facts: NodeFacts) -> list[Core]:
    """Returns the allowed CPUs by physical core, one NUMA node after the other."""
    node_of = {cpu: number for number, cpus in enumerate(facts.numa) for cpu in cpus}
    allowed = set(facts.allowed)
    cores = [allowed_cpus for core in facts.cores if (allowed_cpus := tuple(cpu for cpu in core if cpu in allowed))]
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
    """Describes the device of a local rank. ``gpu`` is None if the GPU, or the GPU of the MIG slice, is unknown."""

    name: str
    gpu: Gpu | None

    @property
    def is_slice(self) -> bool:
        return self.name.startswith(_SLICE)

    @property
    def is_nvidia(self) -> bool:
        return self.gpu is not None and not self.gpu.amd


def devices(facts: NodeFacts) -> tuple[Device, ...]:
    """Returns the visible devices of a node in the order of local rank."""
    return tuple(Device(name, _gpu(facts.gpus, name)) for name in facts.visible)


def refuse_slices_of_same_gpu(facts: NodeFacts, ranks: int) -> None:
    """Rejects two ranks on one GPU, which NCCL cannot connect whatever slices they have.

    Raises:
        UserError: two of the first ``ranks`` devices are slices of one GPU.
    """
    slices = [device for device in devices(facts)[:ranks] if device.is_slice and device.gpu is not None]
    counts = Counter(device.gpu.name for device in slices if device.gpu is not None)
    for name, count in counts.items():
        if count > 1:
            raise UserError(
                f"{count} ranks would run on MIG slices of {name} of {facts.node}, but NCCL cannot connect two ranks "
                "on one GPU",
                where="CUDA_VISIBLE_DEVICES",
                fix="set cluster.gpus_per_node=1 to train on one slice, or use slices of different GPUs or whole GPUs",
            )


def _gpu(gpus: Sequence[Gpu], name: str) -> Gpu | None:
    if name.isdigit():
        return next((gpu for gpu in gpus if gpu.index == int(name)), None)
    uuid = name.removeprefix(_SLICE).partition("/")[0]  # MIG-GPU-<uuid>/7/0 of drivers before 470
    matches = [gpu for gpu in gpus if (gpu.uuid or "").startswith(uuid) or name in gpu.slices]
    if len(matches) == 1:
        return matches[0]
    return None


Core = tuple[int, ...]


@dataclass(frozen=True)
class Mask:
    """Returns the logical CPUs of the rank on ``gpu``; None leaves it unbound."""

    gpu: str
    cpus: tuple[int, ...] | None
    reason: str


def cpu_masks(facts: NodeFacts) -> tuple[Mask, ...]:
    """Returns a mask for each GPU of the node, in their order."""
    cores = _cores(facts)
    usable = {gpu.name: _usable(gpu, facts) for gpu in facts.gpus}
    near = {name: tuple(core for core in cores if cpus.intersection(core)) for name, cpus in usable.items()}
    masks: dict[str, Mask] = {}
    for group in _sharing(near):
        for name, share in _share(group, near).items():
            masks[name] = _mask(name, share, usable[name], near[name])
    return tuple(masks[gpu.name] for gpu in facts.gpus)


def unknown_cores(facts: NodeFacts) -> tuple[str, ...]:
    """Returns a note if the masks rely on the numbering of CPUs."""
    guessed = not facts.cores and any(mask.cpus for mask in cpu_masks(facts))
    if guessed:
        return ("the CPUs of each physical core, which were inferred from the numbering of the CPUs",)
    return ()


def _cores(facts: NodeFacts) -> tuple[Core, ...]:
    """Returns the physical cores from the kernel. Otherwise infers them from the numbering of CPUs: if a GPU's CPUs are
    two runs of the same length, the second run has the hyperthreads of the first. No CPU is ever in two cores.
    """
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
    if facts.allowed:
        return set(gpu.cpus) & set(facts.allowed)
    return set(gpu.cpus)


def _sharing(near: Mapping[str, Sequence[Core]]) -> list[list[str]]:
    """Groups GPUs that have a core in common."""
    groups: list[tuple[set[Core], list[str]]] = []
    for name, cores_near in near.items():
        cores = set(cores_near)
        names = [name]
        for other in [group for group in groups if group[0] & cores]:
            groups.remove(other)
            cores |= other[0]
            names = other[1] + names
        groups.append((cores, names))
    return [names for _, names in groups]


def _share(group: Sequence[str], near: Mapping[str, Sequence[Core]]) -> dict[str, list[Core]]:
    """Gives the GPUs of a group contiguous shares of its cores, the GPU with the fewest first; [] for all if one gets
    none.
    """
    free = sorted({core for name in group for core in near[name]})
    shares: dict[str, list[Core]] = {}
    waiting = sorted(group, key=lambda name: len(near[name]))
    for place, name in enumerate(waiting):
        mine = [core for core in free if core in near[name]]
        sharers = sum(bool(set(near[other]) & set(mine)) for other in waiting[place:])
        shares[name] = mine[: -(-len(mine) // max(1, sharers))]
        free = [core for core in free if core not in shares[name]]
    if all(shares.values()):
        return shares
    return {name: [] for name in group}


def _mask(gpu: str, share: Sequence[Core], usable: set[int], near: Sequence[Core]) -> Mask:
    cpus = tuple(sorted(cpu for core in share for cpu in core if cpu in usable))
    if cpus:
        return Mask(gpu, cpus, f"{len(share)} of the {len(near)} cores near it")
    if not near:
        return Mask(gpu, None, "the CPUs near it are unknown or not allowed")
    return Mask(gpu, None, "there are fewer cores than GPUs that share them")
