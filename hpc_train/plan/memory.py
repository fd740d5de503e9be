"""Estimates from the config the memory of each rank, and the size of the model and its optimizer state, without torch.

Activations are counted for the built-in transformers as autograd keeps them (a test counts the bytes): a layer's normed
inputs, projections, attention and feed-forward products. ``Memory`` leaves out what is not in tensors; ``needed_bytes``
adds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_train.config.extensions import Activations, family_of
from hpc_train.config.schema import Config, ModelConfig, StrategyConfig
from hpc_train.config.values import runs_own_code
from hpc_train.plan.activation_offload import bytes_of_layers
from hpc_train.plan.counted import counted
from hpc_train.plan.hooks import averages_of_weights
from hpc_train.plan.optimizers import held_whole, values_per_parameter
from hpc_train.plan.partition import layer_counts
from hpc_train.plan.techniques import CARRYING
from hpc_train.units import format_bytes

if TYPE_CHECKING:
    from hpc_train.plan.layout import Layout  # which uses the estimate


ALLOCATOR_SHARE = 0.05  # what the allocator reserves beyond the bytes in use, as a share of them; an estimate
RESERVED_BYTES = 2.0e9  # of a GPU, for the context, libraries and buffers of collectives; an estimate


def needed_bytes(
    held: float, allocator_share: float = ALLOCATOR_SHARE, reserved_bytes: float = RESERVED_BYTES
) -> float:
    """Returns the bytes that a GPU must have for ``held`` bytes of tensors.

    Args:
        allocator_share: of the machine file, like ``reserved_bytes``, if it is known which one describes the GPU.
    """
    return held * (1 + allocator_share) + reserved_bytes


def usable_bytes(device_bytes: float) -> float:
    """Returns the bytes of tensors for which a GPU of ``device_bytes`` has room: the inverse of ``needed_bytes``."""
    return (device_bytes - RESERVED_BYTES) / (1 + ALLOCATOR_SHARE)


@dataclass(frozen=True)
class Memory:
    """Bytes on the device of one rank."""

    parameters: float  # with copies in the compute type
    gradients: float
    optimizer: float
    activations: float
    hooks: float = 0.0  # averages of the weights

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.hooks

    @property
    def largest(self) -> str:
        """Returns the name of the largest part."""
        return max(vars(self), key=lambda name: float(getattr(self, name)))

    def __str__(self) -> str:
        shown = {name: size for name, size in vars(self).items() if size or name != "hooks"}
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in shown.items())
        return f"{format_bytes(self.total)} ({parts})"


def estimate(config: Config, layout: Layout) -> Memory | None:
    """Returns the memory of the rank that needs the most; None if neither the model's family tells its sizes nor the
    cache has counts of it, or if code of the user's own runs.
    """
    config = counted(config)
    if runs_own_code(config) or parameter_count(config.model) is None:
        return None
    return max((_of_rank(config, layout, rank) for rank in range(layout.pp)), key=lambda memory: memory.total)


def _of_rank(config: Config, layout: Layout, pp_rank: int) -> Memory:
    width, narrow = _widths(config)
    parameters = _held_parameters(config, layout, pp_rank)
    sharded = layout.shards_state
    offload = config.strategy.offload
    share = parameters / layout.shard if sharded else parameters
    gathered = _gathered(config, layout, pp_rank, parameters) if sharded else parameters
    copies = gathered * narrow if sharded or narrow < width else 0.0  # autocast keeps its copies until the backward
    whole_gradients = not sharded or ("gradients" not in layout.kind.shards and layout.micro_batches > 1)
    # the owner of a whole parameter has a copy of it and of its gradient
    whole = 2 * width if (sharded or layout.tp > 1) and held_whole(config.optim) else 0
    trained = _trained_share(config.model)
    moments = whole + values_per_parameter(config.optim) * {"bf16": 2, "8bit": 1}.get(config.optim.moments, width)
    return Memory(
        parameters=copies + (0.0 if offload == "all" else share * width),
        gradients=0.0 if offload == "all" else (parameters if whole_gradients else share) * trained * width,
        optimizer=share * trained * moments if offload == "none" else 0.0,
        activations=_activations(config, layout, pp_rank, narrow),
        hooks=0.0 if offload == "all" else share * trained * width * averages_of_weights(config),
    )


def _widths(config: Config) -> tuple[int, int]:
    """Bytes of a parameter, and of what it is computed with."""
    name = config.precision.name
    return (8, 8) if name == "fp64" else (4, 2 if name in ("bf16", "fp16") else 4)


def _layers_of_rank(config: Config, layout: Layout, pp_rank: int) -> dict[int, int]:
    """The number of layers of each stage of the rank."""
    counts = layer_counts(config.model.n_layers, layout.stages, config.strategy.pp_split if layout.pp > 1 else "even")
    return {stage: counts[stage] for stage, rank in enumerate(layout.placement) if rank == pp_rank}


def _has_head(layout: Layout, pp_rank: int) -> bool:
    return pp_rank == layout.placement[-1]


def _held_parameters(config: Config, layout: Layout, pp_rank: int) -> float:
    """Parameters of the stages of one rank, before they are sharded."""
    count, layer = parameter_count(config.model), _layer_parameters(config)
    assert count is not None
    outside = count - config.model.n_layers * layer  # stem and head
    tied = getattr(config.model, "tied_embeddings", False)
    ends = (pp_rank == 0) + _has_head(layout, pp_rank)
    layers = sum(_layers_of_rank(config, layout, pp_rank).values())
    return (layers * layer + outside * (1 if tied and ends else ends / 2)) / layout.tp


def _layer_parameters(config: Config) -> int:
    """The number of parameters of one layer."""
    from dataclasses import replace

    count = family_of(config.model).layer_parameters
    if count is not None:
        return count(config.model) or 0
    one, two = (parameter_count(replace(config.model, n_layers=number)) for number in (1, 2))
    assert one is not None and two is not None
    return two - one


def _gathered(config: Config, layout: Layout, pp_rank: int, parameters: float) -> float:
    """Returns the parameters that are gathered at one time: all, or if sharded two layers, the stem and the head."""
    if "parameters" not in layout.kind.shards:
        return parameters
    layer, layers = _layer_parameters(config) / layout.tp, sum(_layers_of_rank(config, layout, pp_rank).values())
    return parameters - max(0, layers - 2) * layer


def _activations(config: Config, layout: Layout, pp_rank: int, narrow: int) -> float:
    count = family_of(config.model).activations
    assert count is not None
    kept = count(config.model, config.data)
    of_layers = bytes_of_layers(config, layout, pp_rank)
    logits = _logit_bytes(config, kept, narrow) if _has_head(layout, pp_rank) else 0.0
    return of_layers + layout.micro_size * kept.tokens * logits


def _logit_bytes(config: Config, kept: Activations, narrow: int) -> float:
    """Returns the bytes per token of the result of the softmax and of two gradients, all in at least fp32.

    Narrower logits are freed before the backward begins.
    """
    return kept.logits * 3 * max(4, narrow) / config.train.loss_chunks


def _trained_share(model: ModelConfig) -> float:
    """The share of the parameters that train; the others have no gradients and no optimizer state."""
    count, trained = parameter_count(model), _trained_count(model)
    return 1.0 if not count or trained is None else trained / count


def _trained_count(model: ModelConfig) -> int | None:
    """The number of parameters that train, which are those in a checkpoint; None if it is unknown."""
    count = family_of(model).trained_parameters
    return parameter_count(model) if count is None else count(model)


def parameter_count(model: ModelConfig) -> int | None:
    """The number of parameters; None if the model's family cannot compute it."""
    count = family_of(model).parameters
    return None if count is None else count(model)


def state_bytes(config: Config, replicas: int = 1) -> int | None:
    """Returns the bytes of a checkpoint; None if unknown.

    It has the parameters, the optimizer's values for each, and the averages that hooks keep.

    Frozen weights that adapters are trained beside are not in checkpoints.

    Args:
        replicas: the number of replicas. Each adds the residual of its compressed gradients.
    """
    config = counted(config)
    parameters = None if runs_own_code(config) else _trained_count(config.model)
    if parameters is None:
        return None
    width = 8 if config.precision.name == "fp64" else 4
    moment = 2 if config.optim.moments == "bf16" else width
    values = width + moment * values_per_parameter(config.optim)
    values += width * averages_of_weights(config)
    return int(parameters * (values + width * _carried_per_parameter(config.strategy, replicas)))


def host_copy_bytes(config: Config, replicas: int, nodes: int) -> float | None:
    """Returns the host memory of a node, in bytes, that the copies of an asynchronous save take; None if unknown.

    Each byte of a checkpoint is copied on the one rank that writes it, and the plan of a save spreads them evenly.
    """
    size = state_bytes(config, replicas)
    return None if size is None else size / nodes


def _carried_per_parameter(strategy: StrategyConfig, replicas: int) -> int:
    """Returns the values per parameter: a residual on each replica, and with momentum correction a velocity."""
    if replicas == 1 or strategy.compression not in CARRYING:
        return 0
    return replicas * (2 if strategy.compression == "topk" and strategy.compression_momentum else 1)
