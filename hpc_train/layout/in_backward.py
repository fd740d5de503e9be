"""States what an update inside the backward pass (``optim.in_backward``) cannot be combined with, and why.

Each parameter is updated as soon as its gradient is final, so that the gradients of a model never exist at the same
time (LOMO: Lv et al. 2024, arXiv:2306.09782). Whatever needs all gradients before the first update is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from hpc_train.config.schema import Config
from hpc_train.errors import UserError, check_all
from hpc_train.layout.layout import Layout
from hpc_train.layout.optimizers import own_targets
from hpc_train.layout.techniques import CARRYING, kinds_where

WHERE = "optim.in_backward"
OFF = f"{WHERE}=false"


def check_in_backward(config: Config, layout: Layout) -> None:
    """Checks that the rest of the config supports ``optim.in_backward``, if that is set.

    Raises:
        UserError: parameters cannot be updated during the backward pass of this config. The message has all reasons.
    """
    if config.optim.in_backward:
        check_all(*(partial(_refuse, *found) for found in (*_of_layout(config, layout), *_of_config(config))))


def _refuse(reason: str, where: str, fix: str) -> None:
    raise UserError(f"{WHERE} is true, but {reason}", where=f"{WHERE}, {where}", fix=f"{fix}, or {OFF}")


def can_update_in_backward(config: Config, layout: Layout) -> bool:
    """Returns whether the key may be true in this config."""
    return not any((*_of_layout(config, layout), *_of_config(config)))


def _of_layout(config: Config, layout: Layout) -> Iterator[tuple[str, str, str]]:
    """Yields why a layout excludes it, where that is set, and what to set instead."""
    kinds = kinds_where(lambda row: row.updated_as is not None)
    if layout.pp > 1:
        yield (
            "a pipeline adds the gradients of several micro-batches before any of them is final",
            f"strategy.pp={layout.pp}",
            "strategy=single or dp",
        )
    if layout.tp > 1:
        yield (
            "the gradients of norms are partial sums on tensor-parallel ranks until the backward pass has ended",
            f"strategy.tp={layout.tp}",
            "strategy=single or dp",
        )
    if config.train.reproducible is not None:
        yield "train.reproducible sums whole gradients over a tree", "train.reproducible", "train.reproducible=null"
    elif layout.shards_state:
        yield (
            f"{layout.kind.name} reduces the gradients of a whole block at once and keeps only the shard of each rank",
            f"strategy.data_parallel={layout.kind.name}",
            f"strategy.data_parallel={kinds}",
        )
    elif layout.dp_cp > 1 and layout.kind.updated_as is None:
        yield (
            f"strategy.data_parallel={layout.kind.name} reduces gradients by code that cannot update parameters",
            "strategy.data_parallel",
            f"strategy.data_parallel={kinds}",
        )
    if layout.micro_batches > 1:
        yield (
            f"a step adds the gradients of {layout.micro_batches} micro-batches, so none is final before the last",
            "batch.micro_size, batch.micro_batches",
            "a larger batch.micro_size, a smaller batch.global_size or more ranks",
        )


def _of_config(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yields why another key excludes it, where that is set, and what to set instead."""
    optim, strategy = config.optim, config.strategy
    if optim.clip_norm:
        yield (
            f"clipping to optim.clip_norm={optim.clip_norm:g} needs the norm of all gradients before the first update",
            "optim.clip_norm",
            "optim.clip_norm=0",
        )
    if config.precision.name == "fp16":
        yield (
            "fp16 skips a step if any of its gradients overflows, which is known after the last",
            "precision",
            "precision=bf16",
        )
    if config.precision.weights != "fp32":
        yield (
            "the optimizer updates the fp32 masters of the weights, not the parameters that have the gradients",
            f"precision.weights={config.precision.weights}",
            "precision.weights=fp32",
        )
    if strategy.compression in CARRYING:
        yield (
            f"{strategy.compression} keeps the unsent part of gradients only if all gradients of a step are finite",
            "strategy.compression",
            "strategy.compression=bf16",
        )
    if strategy.offload != "none":
        yield "the host updates parameters after the backward", "strategy.offload", "strategy.offload=none"
    if config.train.debug:
        yield "train.debug looks at all gradients after the backward", "train.debug", "train.debug=false"
    for target in own_targets(optim):
        if not target.elementwise and target.torch_name is None:
            yield (
                f"{target.path} may need the gradients of several parameters for an update",
                f"{target.where}._target_",
                f"{target.where}.elementwise=true if it computes each element alone",
            )
