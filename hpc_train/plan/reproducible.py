"""``train.reproducible=any_world_size``: how a step is divided, and where the promise cannot be held.

A step is ``logical_micro_batches`` micro-batches, whatever the number of ranks; each rank computes consecutive ones.
"""

from __future__ import annotations

import math

from hpc_train.config.schema import BatchConfig, Config
from hpc_train.errors import UserError
from hpc_train.plan.techniques import find_kind

ANY_WORLD_SIZE = "any_world_size"
AUTO = 8  # logical micro-batches: as many ranks as a node has GPUs
_WHERE = "train.reproducible"


def divide(config: Config, dp: int) -> tuple[int, int, int]:
    """Logical micro-batches of a step, and the micro-batches of each of ``dp`` ranks, and the samples of each.

    Raises:
        UserError: more ranks than logical micro-batches, or more of these than samples.
    """
    batch = config.batch
    logical = _logical(batch)
    if dp > logical:
        raise UserError(
            f"{dp} ranks share {logical} logical micro-batches: some would have none",
            where=f"batch.logical_micro_batches, {_WHERE}",
            fix=f"batch.logical_micro_batches={dp} or more from the first step on, or at most {logical} ranks",
        )
    return logical, math.ceil(logical / dp), math.ceil(batch.global_size / logical)


def check_reproducible(config: Config, pp: int, tp: int) -> None:
    """Raises UserError where the weights would depend on the number of ranks, with the reason."""
    kind = find_kind(config.strategy.data_parallel)
    if pp > 1 or tp > 1:
        raise UserError(
            f"{'a pipeline' if pp > 1 else 'tensor parallelism'} computes a layer's sums in parts that depend on how "
            "many ranks share them, so the bits of the weights would too",
            where=f"strategy.pp={pp}, strategy.tp={tp}, {_WHERE}",
            fix="strategy=single or dp, or train.reproducible=null",
        )
    if not kind.reproducible:
        raise UserError(
            f"{kind.name} reduces gradients in an order that depends on the number of ranks",
            where=f"strategy.data_parallel, {_WHERE}",
            fix="strategy=single or dp, or train.reproducible=null",
        )
    if config.train.compile:
        raise UserError(
            "compiled code may be another on each machine, and so may its rounding",
            where=f"train.compile, {_WHERE}",
            fix="train.compile=false",
        )
    if config.batch.micro_size != "auto" or config.batch.micro_batches != "auto":
        raise UserError(
            "the micro-batches of a rank depend on the number of ranks",
            where=f"batch.micro_size, batch.micro_batches, {_WHERE}",
            fix="leave both auto; batch.logical_micro_batches divides the global batch",
        )


def _logical(batch: BatchConfig) -> int:
    if not isinstance(batch.logical_micro_batches, int):
        return min(AUTO, batch.global_size)
    if batch.logical_micro_batches > batch.global_size:
        raise UserError(
            f"{batch.global_size} samples do not fill {batch.logical_micro_batches} logical micro-batches",
            where="batch.logical_micro_batches",
            fix=f"batch.logical_micro_batches={batch.global_size} or fewer",
        )
    return batch.logical_micro_batches
