"""Binds each local rank to CPUs near its GPU when the rank is forked, before CUDA and data loaders start.

NCCL keeps its threads within the affinity mask, and loaders allocate memory on the near NUMA node. The mask of a rank
is its share of the physical cores near its GPU. It is never empty, contains only CPUs that the process may use, and
does not overlap with the masks of other ranks; if that is impossible, the rank is not bound. A thread binding of the
user takes precedence. Devices are named as in CUDA_VISIBLE_DEVICES (numbers, UUIDs, MIG slices), AMD devices as in
ROCR_VISIBLE_DEVICES.
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
    """Holds the logical CPUs of a local rank; None means that it is not bound. ``cores`` is the number of physical
    cores."""

    cpus: tuple[int, ...] | None
    cores: int
    reason: str


def bindings(facts: NodeFacts, ranks: int) -> tuple[Binding, ...]:
    """Returns a binding for each of the node's ``ranks`` ranks.

    On a node without GPUs, each rank gets neighboring cores, but only if all visible CPUs belong to the job.
    """
    binder = next((setting for setting in facts.settings if setting.name in BINDERS), None)
    if binder is not None:
        return _unbound(ranks, f"{binder.name} is set by {binder.source}, which takes precedence")
    if facts.visible:
        gpus = {device.gpu.index: device.gpu for device in devices(facts)[:ranks] if device.gpu is not None}
        if len(gpus) < ranks:
            return _unbound(ranks, "the GPU of each rank is unknown")
        masks = cpu_masks(replace(facts, gpus=tuple(gpus.values())))
        return tuple(_binding(facts, mask.cpus, mask.reason) for mask in masks)
    if facts.allocated_cpus is None:
        return _unbound(ranks, "there is no GPU and no Slurm job, so other processes may use the CPUs")
    if facts.allocated_cpus < len(facts.allowed):
        return _unbound(ranks, f"Slurm allocated {facts.allocated_cpus} CPUs but {len(facts.allowed)} are visible")
    node_of = {cpu: number for number, cpus in enumerate(facts.numa) for cpu in cpus}
    allowed = set(facts.allowed)
    cores = [allowed_cpus for core in facts.cores if (allowed_cpus := tuple(cpu for cpu in core if cpu in allowed))]
    cores.sort(key=lambda core: (node_of.get(core[0], 0), core))
    if len(cores) < ranks:
        return _unbound(ranks, f"{len(cores)} cores are too few for {ranks} ranks")
    cuts = [len(cores) * rank // ranks for rank in range(ranks + 1)]
    return tuple(
        _binding(facts, sum(cores[start:end], ()), f"{end - start} of {len(cores)} cores")
        for start, end in pairwise(cuts)
    )


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
    """Rejects two ranks on slices of the same GPU, which NCCL cannot connect. Raises UserError if two of the first
    ``ranks`` devices are slices of one GPU."""
    slices = [device for device in devices(facts)[:ranks] if device.is_slice and device.gpu is not None]
    counts = Counter(device.gpu.name for device in slices if device.gpu is not None)
    for name, count in counts.items():
        if count > 1:
            raise UserError(
                f"{count} ranks would run on MIG slices of {name} of {facts.node}, but NCCL cannot connect two ranks "
                "on one GPU",
                where="CUDA_VISIBLE_DEVICES",
                fix="set cluster.gpus_per_node=1 to train on one slice, or use slices of different GPUs or full GPUs",
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
    """Holds the logical CPUs of the rank on ``gpu``; None means that the rank is not bound."""

    gpu: str
    cpus: tuple[int, ...] | None
    reason: str


def cpu_masks(facts: NodeFacts) -> tuple[Mask, ...]:
    """Returns a mask for each GPU of the node, in their order."""
    cores = _cores(facts)
    usable = {gpu.name: set(gpu.cpus).intersection(facts.allowed or gpu.cpus) for gpu in facts.gpus}
    near = {name: tuple(core for core in cores if cpus.intersection(core)) for name, cpus in usable.items()}
    masks: dict[str, Mask] = {}
    for group in _sharing(near):
        for name, share in _share(group, near).items():
            cpus = tuple(sorted(cpu for core in share for cpu in core if cpu in usable[name]))
            if cpus:
                masks[name] = Mask(name, cpus, f"{len(share)} of the {len(near[name])} cores near it")
            elif near[name]:
                masks[name] = Mask(name, None, "there are fewer cores than GPUs that share them")
            else:
                masks[name] = Mask(name, None, "the CPUs near it are unknown or not allowed")
    return tuple(masks[gpu.name] for gpu in facts.gpus)


def unknown_cores(facts: NodeFacts) -> tuple[str, ...]:
    """Returns a note if the masks rely on an inference from the numbering of CPUs."""
    guessed = not facts.cores and any(mask.cpus for mask in cpu_masks(facts))
    if guessed:
        return ("the CPUs of each physical core, which were inferred from the numbering of the CPUs",)
    return ()


def _cores(facts: NodeFacts) -> tuple[Core, ...]:
    """Returns the physical cores that the kernel reports. Without a report, infers them from the numbering of CPUs: if
    the CPUs of a GPU are two runs of the same length, the second run has the hyperthreads of the first. A CPU is always
    in a single core.
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


def _sharing(near: Mapping[str, Sequence[Core]]) -> list[list[str]]:
    """Groups GPUs that are near a common core."""
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
    """Assigns contiguous shares of a group's cores to its GPUs, first to the GPU with the fewest cores. All shares are
    empty if one would be.
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
