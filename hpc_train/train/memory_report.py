"""Where the memory of every rank went: what is held from step to step, and the rest of the peak."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpc_train.config.memory import GIB, estimate
from hpc_train.config.schema import Config
from hpc_train.measure.memory import peak_device_memory, peak_host_memory
from hpc_train.parallel.engine import Engine
from hpc_train.parallel.mesh import Mesh
from hpc_train.train.optimizer import Optimizer


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the device of one rank.

    Attributes:
        peak: of the GPU's allocator; on the CPU the resident set, with the interpreter and its libraries.
        activations: the rest of the peak: activations, and whatever else there was at that moment.
    """

    peak: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int


@dataclass(frozen=True)
class MemoryReport:
    """Of all ranks, by rank."""

    ranks: tuple[RankMemory, ...]
    estimated: float | None  # of the rank that needs most

    def as_json(self) -> dict[str, Any]:
        return {"estimated": self.estimated, "ranks": [asdict(rank) for rank in self.ranks]}

    def __str__(self) -> str:
        rank, most = max(enumerate(self.ranks), key=lambda pair: pair[1].peak)
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in asdict(most).items() if name != "peak")
        told = f"memory: at most {most.peak / GIB:.2f} GiB, on rank {rank}: {parts} (with all else)"
        return told if self.estimated is None else f"{told}; estimated {self.estimated / GIB:.2f}"


def report_memory(config: Config, mesh: Mesh, engine: Engine, optimizer: Optimizer) -> MemoryReport:
    """After a step, while its gradients are there. Collective."""
    parameters = engine.named_parameters().values()
    peak = peak_device_memory(mesh.device) or peak_host_memory()
    weights = _bytes(parameters, mesh)
    gradients = _bytes((parameter.grad for parameter in parameters if parameter.grad is not None), mesh)
    state = _bytes(optimizer.tensors(), mesh)
    own = RankMemory(peak, weights, gradients, state, max(0, peak - weights - gradients - state))
    ranks: list[Any] = [None] * mesh.layout.world_size
    dist.all_gather_object(ranks, own, group=mesh.control)
    needed = estimate(config, mesh.layout)
    return MemoryReport(tuple(ranks), None if needed is None else needed.total)


def _bytes(tensors: Iterable[Tensor], mesh: Mesh) -> int:
    """Of what is on the ranks' device: not what is offloaded."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local if tensor.device.type == mesh.device.type)
