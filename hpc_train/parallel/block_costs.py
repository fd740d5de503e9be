"""What each block of a model costs, measured: time and memory of the stem, every layer and the head, one by one.

The work is shared: in each round every column of ranks (a column is one rank, or the ranks of one tensor-parallel
group) measures another block, all at the same time, as in training. A block is built, filled and dropped again, so the
whole model never exists.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.config.schema import Config
from hpc_train.data.batch import Batch
from hpc_train.models.model import Model
from hpc_train.parallel.materialise import materialise
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.parallelise import split_and_wrap
from hpc_train.parallel.precision import autocast, parameter_dtype, travelling_dtype
from hpc_train.parallel.split import cut

VISITS = 2  # of every block, by different columns where there are several
PASSES = 5  # timed ones of a visit


@dataclass(frozen=True)
class BlockCost:
    """One block, for one micro-batch.

    Attributes:
        seconds: of forward and backward, on the CPU those of the process, so that whatever else runs on its cores does
            not count; under ``pp_split=flops`` FLOP.
        parameters: their number, on one rank of a tensor-parallel group.
        activation_bytes: kept from the forward to the backward, its input among it.
    """

    name: str
    seconds: float
    parameters: int = 0
    activation_bytes: int = 0


@dataclass(frozen=True)
class _Visit:
    block: int
    seconds: tuple[float, ...]
    parameters: int
    activation_bytes: int


def block_names(model: Model) -> list[str]:
    return ["stem", *(f"layers.{key}" for key in model.layers), "head"]


def block_parameters(model: Model) -> list[int]:
    """Parameters of each block; a table that stem and head share counts in both, which each hold a copy."""
    blocks = (model.get_submodule(name) for name in block_names(model))
    return [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]


def measure_blocks(config: Config, mesh: Mesh, model: Model, example: Batch) -> tuple[BlockCost, ...]:
    """The cost of every block of ``model``, the same on every rank. Collective.

    Args:
        model: the whole model on ``meta``; it is not changed.
        example: a micro-batch as a step has them, on the device.
    """
    blocks, columns = len(model.layers) + 2, mesh.layout.world_size // mesh.layout.tp
    visits = []
    for number in range(math.ceil(VISITS * blocks / columns)):
        dist.barrier(group=mesh.control)
        visits.append(_visit(config, mesh, model, (number * columns + mesh.rank // mesh.layout.tp) % blocks, example))
    gathered: list[list[_Visit]] = [[]] * mesh.layout.world_size
    dist.all_gather_object(gathered, visits, group=mesh.control)
    return tuple(
        _merged(name, [visit for of_rank in gathered for visit in of_rank if visit.block == block])
        for block, name in enumerate(block_names(model))
    )


def _merged(name: str, visits: list[_Visit]) -> BlockCost:
    seconds = min(value for visit in visits for value in visit.seconds)  # what disturbs a pass only makes it longer
    return BlockCost(name, seconds, visits[0].parameters, max(visit.activation_bytes for visit in visits))


def _visit(config: Config, mesh: Mesh, model: Model, block: int, example: Batch) -> _Visit:
    part = _alone(config, mesh, model, block)
    hidden = example.inputs
    if block > 0:
        micro, tokens, *rest = part.hidden_shape(example.inputs)
        shape = (micro, tokens // part.sequence_shards, *rest)
        dtype = travelling_dtype(mesh.layout, config.precision.name)
        hidden = torch.randn(shape, dtype=dtype, device=mesh.device, requires_grad=True)
    kept = _pass(part, hidden, example, config.precision.name)  # also warms up: the allocator, compiled code
    seconds, clock = [], time.perf_counter if mesh.device.type == "cuda" else time.process_time
    for _ in range(PASSES):
        _settle(mesh.device)
        begin = clock()
        _pass(part, hidden, example, config.precision.name, look=False)
        _settle(mesh.device)
        seconds.append(clock() - begin)
    return _Visit(block, tuple(seconds), sum(_local(p).numel() for p in part.parameters()), kept)


def _alone(config: Config, mesh: Mesh, model: Model, block: int) -> Model:
    """The block as a stage of its own, as a rank trains it but for the sharding of its state."""
    layers = [range(0), *(range(layer, layer + 1) for layer in range(len(model.layers))), range(0)]
    part = cut(model, block, layers)
    split_and_wrap(config, mesh, part)
    materialise(part, mesh.device, config.train.seed, parameter_dtype(config.precision.name))
    return part.train()


def _pass(part: Model, hidden: Tensor, example: Batch, precision: str, look: bool = True) -> int:
    """Forward and backward; returns the bytes that the forward kept, where it is to ``look``."""
    with _kept(part, hidden) if look else _nothing_kept() as kept, autocast(precision, hidden.device):
        output = part(hidden, example.context, example.targets)
    if isinstance(output, Tensor):
        output.backward(torch.ones_like(output))
    else:
        output[0].backward()
    part.zero_grad(set_to_none=True)
    hidden.grad = None
    return sum(kept.values())


@contextmanager
def _kept(part: Model, hidden: Tensor) -> Iterator[dict[int, int]]:
    """Bytes by the address of their memory: of the input, and of what autograd saves besides parameters."""
    own = {_local(parameter).untyped_storage().data_ptr() for parameter in part.parameters()}
    kept = {hidden.untyped_storage().data_ptr(): hidden.untyped_storage().nbytes()}
    alive = []  # so that no address is used twice

    def pack(saved: Tensor) -> Tensor:
        storage = _local(saved).untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(storage)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        yield kept
    alive.clear()


@contextmanager
def _nothing_kept() -> Iterator[dict[int, int]]:
    yield {}


def _local(value: Tensor) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
