"""Estimates from the config the memory of each rank, and the size of the model and its optimizer state, without torch.

``peak`` replays what a rank allocates and frees in a step. ``Memory`` leaves out what is not in tensors;
``needed_bytes`` adds it.
"""

from __future__ import annotations

from hpc_train.config.schema import Config, StrategyConfig
from hpc_train.config.values import runs_own_code
from hpc_train.layout.counted import counted
from hpc_train.layout.hooks import averages_of_weights
from hpc_train.layout.layout import Layout
from hpc_train.layout.optimizers import values_per_parameter
from hpc_train.layout.peak.program import peak_exceeds, peak_of
from hpc_train.layout.peak.ranks import ranks_of
from hpc_train.layout.peak.replay import Memory
from hpc_train.layout.peak.sizes import parameter_count, sizes_of, trained_count
from hpc_train.layout.techniques import CARRYING

__all__ = ["Memory", "estimate", "needed_bytes", "parameter_count", "state_bytes", "usable_bytes"]

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


def estimate(config: Config, layout: Layout) -> Memory | None:
    """Returns the memory of the rank that needs the most; None if neither the model's family tells its sizes nor the
    cache has counts of it, or if custom code runs.
    """
    config = counted(config)
    if not _tells_sizes(config):
        return None
    sizes = sizes_of(config, layout)
    return max((peak_of(sizes, rank) for rank in ranks_of(config, layout)), key=lambda memory: memory.total)


def exceeds(config: Config, layout: Layout, limit: float) -> bool:
    """Returns whether a rank needs more than ``limit`` bytes by ``estimate``, in less time; False if that is None."""
    config = counted(config)
    if not _tells_sizes(config):
        return limit < 0
    sizes = sizes_of(config, layout)
    return any(peak_exceeds(sizes, rank, limit) for rank in ranks_of(config, layout))


def _tells_sizes(config: Config) -> bool:
    return not runs_own_code(config) and parameter_count(config.model) is not None


def state_bytes(config: Config, replicas: int = 1) -> int | None:
    """Returns the bytes of a checkpoint; None if unknown.

    It has the parameters, the optimizer's values for each, and the averages that hooks keep.

    Frozen weights that adapters are trained beside are not in checkpoints.

    Args:
        replicas: the number of replicas. Each adds the residual of its compressed gradients.
    """
    config = counted(config)
    parameters = None if runs_own_code(config) else trained_count(config.model)
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
    """Returns the values per parameter: a residual on each replica."""
    if replicas == 1 or strategy.compression not in CARRYING:
        return 0
    return replicas
