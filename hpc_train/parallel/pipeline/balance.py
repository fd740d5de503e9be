"""Chooses the layers of each stage by the cost of the stem, layers and head (``strategy.pp_split=flops|measured``).

The first attempt writes the split to ``pp_split.json`` in the run directory, and later attempts with as many stages
reuse it. Names of parameters are global, so a checkpoint of any split fits any other.

Measurements are shared: in each round every column of ranks (one rank, or the ranks of one tensor-parallel group)
measures another block at the same time. A block is built, initialized and dropped, so the whole model never exists.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.config.schema import Config
from hpc_train.data.dataset import Batch, Dataset
from hpc_train.data.feed import example_micro_batch
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout
from hpc_train.layout.memory import reserved_bytes, usable_bytes
from hpc_train.layout.optimizers import values_per_parameter
from hpc_train.layout.partition import Prediction, blocks_of, layers_of, partition, predict
from hpc_train.models.batch_norm import has_batch_statistics
from hpc_train.models.build import build_model
from hpc_train.models.linear_head import LinearHead
from hpc_train.models.model import Model, check_hidden_shape, refuse_ragged
from hpc_train.models.moe import Experts
from hpc_train.parallel.collectives import broadcast_plain
from hpc_train.parallel.context import own_tokens
from hpc_train.parallel.mesh import Mesh, synchronize
from hpc_train.parallel.parallelize import materialize, split_and_wrap
from hpc_train.parallel.pipeline.split import cut, split_layers
from hpc_train.parallel.precision.dtypes import (
    KeptCasts,
    autocast,
    compute_dtype,
    hidden_dtype,
    kept_by,
    kept_dtype,
    parameter_dtype,
)
from hpc_train.parallel.precision.masters import local_part
from hpc_train.run.directory import PIPELINE_SPLIT, RunDirectory
from hpc_train.run.files import write_json
from hpc_train.units import format_bytes

_WHERE = "strategy.pp_split"


@dataclass(frozen=True)
class SplitPlan:
    """Holds a split of the layers into stages, with the costs and predictions that led to it.

    Attributes:
        how: ``flops`` or ``measured``.
        layers: the layers of each stage.
        even: the prediction for the even split; None if there are fewer layers than stages.
        reused: whether the split was read from the run directory.
    """

    how: str
    layers: tuple[range, ...]
    blocks: tuple[BlockCost, ...]
    predicted: Prediction
    even: Prediction | None
    reused: bool = False

    def as_json(self) -> dict[str, Any]:
        """Returns the plan as it is stored in the run directory and the event log."""
        return {
            "how": self.how,
            "layers": [len(held) for held in self.layers],
            "blocks": [asdict(block) for block in self.blocks],
            "predicted": asdict(self.predicted) | {"imbalance": self.predicted.imbalance},
            "even": None if self.even is None else asdict(self.even) | {"imbalance": self.even.imbalance},
        }

    def describe(self) -> str:
        """Returns one line for the log."""
        stages = "|".join(str(len(numbers)) for numbers in self.layers)
        reused = ", reused from an earlier attempt" * self.reused
        text = f"pipeline split ({self.how}{reused}): {stages} layers per stage; predicted: the slowest stage takes "
        text += f"{self.predicted.imbalance:.2f} x the mean, bubble {self.predicted.bubble_share:.1%}"
        if self.even is not None:
            text += f" (even split: {self.even.imbalance:.2f} x, {self.even.bubble_share:.1%})"
        return text


def plan_split(config: Config, mesh: Mesh, dataset: Dataset, run: RunDirectory | None = None) -> SplitPlan | None:
    """Returns the split of this attempt, the same on every rank; None if the config defines it. Collective.

    Args:
        dataset: the dataset that defines the shape of a micro-batch.
        run: the run directory, from which a split is read and to which it is written; None always computes it.

    Raises:
        UserError: the model does not define the costs of its blocks, its ``hidden_shape`` is wrong, or no split fits
            into memory.
    """
    how = config.strategy.pp_split
    if mesh.layout.pp == 1 or how not in ("flops", "measured"):
        return None
    model = build_model(config.model, config.train.seed)
    if not isinstance(model, Model):
        return None  # it has no layers to split, which ``build_engine`` reports
    earlier = _read(config, mesh, len(model.layers), run)
    if earlier is not None:
        return _plan(how, earlier[0], earlier[1], mesh.layout, reused=True)
    example = example_micro_batch(dataset, mesh.layout, mesh.device)
    refuse_ragged(example)
    if how == "measured":
        if has_batch_statistics(model):
            raise UserError(
                "the blocks of a model with batch statistics cannot be measured separately, since they wait for all "
                "ranks",
                where=_WHERE,
                fix="strategy.pp_split=even, or a list with the number of layers of each stage",
            )
        check_hidden_shape(model, example.inputs, example.context)  # the shape of the blocks' inputs
        blocks = measure_blocks(config, mesh, model, example)
    else:
        flops = model.block_flops(example.inputs)
        if flops is None:
            raise UserError(
                f"{type(model).__name__} does not count the operations of its blocks (block_flops)",
                where=_WHERE,
                fix="strategy.pp_split=measured, or a list with the number of layers of each stage",
            )
        blocks = tuple(
            _counted(name, of_block, model.get_submodule(name), mesh.layout)
            for name, of_block in zip(block_names(model), flops, strict=True)
        )
    plan = _plan(how, _partition(config, mesh, blocks), blocks, mesh.layout)
    if run is not None and mesh.rank == 0:
        try:
            write_json(run.path / PIPELINE_SPLIT, {"stages": mesh.layout.stages} | plan.as_json())
        except OSError as error:  # e.g. a full disk
            print(f"cannot record the split of the pipeline; the next attempt computes it again: {error}")
    return plan


def _counted(name: str, flops: float, block: nn.Module, layout: Layout) -> BlockCost:
    """Returns the cost of a block of the whole model. A tied table counts in stem and head, which each hold a copy."""
    experts = _expert_values(block)
    others = sum(parameter.numel() for parameter in block.parameters()) - experts
    held = experts // layout.ep
    return BlockCost(name, flops, others // layout.tp + held, experts=held)


def _expert_values(block: nn.Module) -> int:
    """Returns the number of values of the experts of ``block`` that this rank holds."""
    modules = (module for module in block.modules() if isinstance(module, Experts))
    return sum(local_part(parameter).numel() for module in modules for parameter in module.parameters())


def _partition(config: Config, mesh: Mesh, blocks: Sequence[BlockCost]) -> tuple[range, ...]:
    layout = mesh.layout
    cap = _memory_cap(mesh)

    def fits(stage: int, held: range) -> bool:
        held_blocks = [blocks[block] for block in held]
        trains = any(block.parameters for block in held_blocks)
        return trains and (cap is None or stage_bytes(config, layout, stage, held_blocks) <= cap)

    assignment = partition([block.seconds for block in blocks], layout.stages, fits)
    if assignment is None:
        raise UserError(
            f"no split into {layout.stages} stages fits into {format_bytes(cap or 0)} per stage",
            where=_WHERE,
            fix="use a smaller batch.micro_size, train.activation_checkpointing=full, or more stages (strategy.pp)",
        )
    return layers_of(assignment)


def stage_bytes(config: Config, layout: Layout, stage: int, blocks: Sequence[BlockCost]) -> int:
    """Returns the peak bytes of a stage of ``blocks``: parameters, casts, gradients, optimizer state, activations.

    With ZeRO, the ranks share the state of the optimizer and the parameters that it updates. The stages keep gathered
    parameters and gradients from the first to the last micro-batch.
    """
    width = parameter_dtype(config.precision.name).itemsize
    experts = width * sum(block.experts for block in blocks)
    others = width * sum(block.parameters for block in blocks) - experts
    state = 2 * (others + experts)  # precision.weights=bf16 halves the gradients and adds copies of the parameters
    updated = values_per_parameter(config.optim)
    if layout.shards_state:
        updated += 1
        state += int(others * updated) // layout.shard + int(experts * updated) // layout.expert_sizes[1]
    else:
        state += int((others + experts) * updated)
    cast = kept_dtype(config.precision, layout)
    if cast is not None:
        state += sum(block.parameters for block in blocks) * cast.itemsize
    return state + layout.in_flight(stage) * sum(block.activation_bytes for block in blocks)


def _memory_cap(mesh: Mesh) -> int | None:
    """Returns the bytes for one stage on the smallest GPU of the run; None on the CPU, whose memory the ranks share."""
    if mesh.device.type != "cuda":
        return None
    smallest = torch.tensor(torch.cuda.get_device_properties(mesh.device).total_memory)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=mesh.control)
    usable = usable_bytes(int(smallest), reserved_bytes(mesh.layout))
    return int(usable) // mesh.layout.stages_per_rank


def _plan(
    how: str, layers: tuple[range, ...], blocks: tuple[BlockCost, ...], layout: Layout, reused: bool = False
) -> SplitPlan:
    seconds = [block.seconds for block in blocks]

    def prediction(split: tuple[range, ...]) -> Prediction:
        return predict(seconds, blocks_of(split), layout.placement, layout.micro_batches)

    n_layers = len(blocks) - 2
    even = None
    if n_layers >= layout.stages:
        even = prediction(split_layers(n_layers, layout.stages))
    return SplitPlan(how, layers, blocks, prediction(layers), even, reused)


def _read(
    config: Config, mesh: Mesh, n_layers: int, run: RunDirectory | None
) -> tuple[tuple[range, ...], tuple[BlockCost, ...]] | None:
    """Returns the layers and blocks that rank 0 reads from an earlier attempt; None if they do not match this one."""
    record: dict[str, Any] | None = None
    if run is not None and mesh.rank == 0 and (run.path / PIPELINE_SPLIT).exists():
        record = run.json(run.path / PIPELINE_SPLIT)
    plan = broadcast_plain(record, mesh.control)
    expected = (config.strategy.pp_split, mesh.layout.stages, n_layers)
    if plan is None or (plan["how"], plan["stages"], sum(plan["layers"])) != expected:
        return None
    layers = split_layers(n_layers, mesh.layout.stages, plan["layers"])
    return layers, tuple(BlockCost(**block) for block in plan["blocks"])


VISITS = 2  # measurements of every block, by different columns if there are several
PASSES = 5  # timed passes per measurement


@dataclass(frozen=True)
class BlockCost:
    """Holds the costs of one block (stem, layer or head) for one micro-batch.

    Attributes:
        seconds: the time of forward and backward pass; on the CPU the process time, which excludes other processes.
            With ``pp_split=flops`` it holds FLOPs instead.
        parameters: the number of parameters on one rank.
        activation_bytes: the bytes kept from the forward to the backward pass, including the input.
        experts: how many of the parameters belong to experts.
    """

    name: str
    seconds: float
    parameters: int = 0
    activation_bytes: int = 0
    experts: int = 0


@dataclass(frozen=True)
class _Visit:
    block: int
    seconds: tuple[float, ...]
    parameters: int
    activation_bytes: int
    experts: int


def block_names(model: Model) -> list[str]:
    return ["stem", *(f"layers.{key}" for key in model.layers), "head"]


def measure_blocks(config: Config, mesh: Mesh, model: Model, example: Batch) -> tuple[BlockCost, ...]:
    """Measures the cost of every block of ``model``; the result is the same on every rank. Collective.

    Args:
        model: the whole model on ``meta``; it is not changed.
        example: a micro-batch on the device, with the shapes of a training step.
    """
    together = mesh.layout.cp * mesh.layout.ep * mesh.layout.tp  # ranks that communicate inside a block
    blocks = len(model.layers) + 2
    columns = mesh.layout.world_size // together
    visits = []
    for number in range(math.ceil(VISITS * blocks / columns)):
        dist.barrier(group=mesh.control)
        visits.append(_visit(config, mesh, model, (number * columns + mesh.rank // together) % blocks, example))
    gathered: list[list[_Visit]] = [[]] * mesh.layout.world_size
    dist.all_gather_object(gathered, visits, group=mesh.control)
    costs = []
    for block, name in enumerate(block_names(model)):
        of_block = [visit for visited in gathered for visit in visited if visit.block == block]
        seconds = min(value for visit in of_block for value in visit.seconds)  # other load only makes a pass longer
        activation_bytes = max(visit.activation_bytes for visit in of_block)
        costs.append(BlockCost(name, seconds, of_block[0].parameters, activation_bytes, of_block[0].experts))
    return tuple(costs)


def _visit(config: Config, mesh: Mesh, model: Model, block: int, example: Batch) -> _Visit:
    # the block as a separate stage, like that of a rank that trains it but without sharded state
    layers = [range(0), *(range(layer, layer + 1) for layer in range(len(model.layers))), range(0)]
    part = cut(model, block, layers)
    split_and_wrap(config, mesh, part)
    materialize(part, mesh.device, config.train.seed, parameter_dtype(config.precision.name))
    part.train()
    example = own_tokens(example, part, mesh)
    hidden = example.inputs
    if block > 0:
        micro, tokens, *rest = part.hidden_shape(example.inputs)
        shape = (micro, tokens // part.sequence_shards, *rest)
        dtype = hidden_dtype(config.precision)
        hidden = torch.randn(shape, dtype=dtype, device=mesh.device, requires_grad=True)
    seconds = []
    clock = time.perf_counter if mesh.device.type == "cuda" else time.process_time
    with KeptCasts([part], kept_dtype(config.precision, mesh.layout)).step():
        saved_size = _pass(part, hidden, example, config.precision.name)  # which also warms up allocator and compiler
        for _ in range(PASSES):
            synchronize(mesh.device)
            begin = clock()
            _pass(part, hidden, example, config.precision.name, measure=False)
            synchronize(mesh.device)
            seconds.append(clock() - begin)
    saved_size += _fused_bytes(part, hidden, compute_dtype(config.precision.name))
    parameters = sum(local_part(parameter).numel() for parameter in part.parameters())
    return _Visit(block, tuple(seconds), parameters, saved_size, _expert_values(part))


def _fused_bytes(part: Model, hidden: Tensor, dtype: torch.dtype | None) -> int:
    """Returns the bytes of the gradients that a fused loss keeps for the backward pass, which autograd does not save:
    the gradients of the matrix, in at least fp32, and of the normed hidden states.
    """
    if not isinstance(part.head, LinearHead) or not part.head.fused:
        return 0
    weight = local_part(part.head.output.weight)
    of_weight = weight.numel() * max(4, weight.itemsize) if weight.requires_grad else 0
    return of_weight + hidden.numel() * (dtype or hidden.dtype).itemsize


def _pass(part: Model, hidden: Tensor, example: Batch, precision: str, measure: bool = True) -> int:
    """Runs forward and backward pass; returns the bytes that the forward pass keeps if ``measure``, else 0."""
    saved: AbstractContextManager[dict[int, int]] = _saved_bytes(part, hidden) if measure else nullcontext({})
    with saved as saved_sizes, autocast(precision, hidden.device):
        output = part(hidden, example.context, example.targets)
    result = output
    if not isinstance(output, Tensor):
        result = output[0]
    if result.requires_grad:  # a frozen stem has no backward pass
        result.backward(torch.ones_like(result))
    part.zero_grad(set_to_none=True)
    hidden.grad = None
    return sum(saved_sizes.values())


@contextmanager
def _saved_bytes(part: Model, hidden: Tensor) -> Iterator[dict[int, int]]:
    """Yields address -> bytes for the memory of the input and of the tensors that autograd saves, without parameters
    and their casts.
    """
    weights = (*part.parameters(), *kept_by(part))
    weight_memory = {local_part(weight).untyped_storage().data_ptr() for weight in weights}
    sizes = {hidden.untyped_storage().data_ptr(): hidden.untyped_storage().nbytes()}
    alive = []  # keeps the memory, so that no address is used twice

    def pack(saved: Tensor) -> Tensor:
        storage = local_part(saved).untyped_storage()
        if storage.data_ptr() not in weight_memory:
            sizes[storage.data_ptr()] = storage.nbytes()
            alive.append(storage)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        yield sizes
    alive.clear()
