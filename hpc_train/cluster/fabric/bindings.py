"""The CPUs that each local rank is bound to when it is forked, before CUDA starts and before loaders are forked.

NCCL keeps its threads within the mask, and memory of the loaders comes from the near NUMA node. Never wider than what
the job was given; the user's own binding of threads wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hpc_train.cluster.fabric.devices import devices
from hpc_train.cluster.fabric.facts import Gpu, NodeFacts
from hpc_train.cluster.fabric.masks import Core, cpu_masks

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
    cores = _cores(facts)
    if len(cores) < ranks:
        return _unbound(ranks, f"{len(cores)} cores for {ranks} ranks")
    cuts = [len(cores) * rank // ranks for rank in range(ranks + 1)]
    return tuple(
        _binding(facts, sum(cores[start:end], ()), f"{end - start} of {len(cores)} cores")
        for start, end in pairwise(cuts)
    )


def _cores(facts: NodeFacts) -> list[Core]:
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
