"""``strategy.compression``: which techniques there are, and what they do not go with. No torch."""

from __future__ import annotations

from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.plan.techniques import DataParallelKind, kinds_where

COMPRESSION = ("none", "fp16", "bf16", "powersgd", "topk", "auto")
CARRYING = ("powersgd", "topk", "auto")  # they add what they did not send to the next gradient
_WHERE = "strategy.compression"


def check_compression(config: Config, kind: DataParallelKind, tp: int) -> None:
    """Raises UserError where gradients of several replicas cannot be compressed as asked, with the reason."""
    technique = config.strategy.compression
    if technique == "none":
        return
    if kind.compressed_as is None:
        sharded = f"{kind.name} scatters gradients as it sums them: no rank has a whole one to compress"
        raise UserError(
            sharded if kind.shards else f"{kind.name} cannot compress gradients",
            where=f"strategy.data_parallel, {_WHERE}",
            fix=f"strategy.data_parallel={kinds_where(lambda row: row.compressed_as == row.name)}, or {_WHERE}=none",
        )
    if config.train.reproducible is not None:
        raise UserError(
            "what is left out of a compressed gradient depends on how many ranks share the batch, and so would the "
            "bits of the weights",
            where=f"{_WHERE}, train.reproducible",
            fix=f"{_WHERE}=none, or train.reproducible=null",
        )
    if technique in CARRYING:
        _check_carried(config, tp)


def _check_carried(config: Config, tp: int) -> None:
    """Raises UserError for techniques that add what they did not send to the gradients of the next step."""
    strategy, technique = config.strategy, config.strategy.compression
    if tp > 1:
        raise UserError(
            f"under tensor parallelism a rank has slices of gradients; what {technique} carries of them would not fit "
            "another layout",
            where=f"{_WHERE}, strategy.tp",
            fix=f"{_WHERE}=bf16 or none, or strategy.tp=1",
        )
    if config.precision.name == "fp16":
        raise UserError(
            f"what {technique} carries to the next step is in units of the loss scale, which changes",
            where=f"{_WHERE}, precision",
            fix=f"precision=bf16, or {_WHERE}=fp16",
        )
    twice = technique in ("topk", "auto") and config.optim.name == "sgd" and config.optim.momentum
    if twice and strategy.compression_momentum:
        raise UserError(
            f"momentum would count twice: {strategy.compression_momentum:g} before the sum over the replicas and "
            f"{config.optim.momentum:g} after it",
            where="strategy.compression_momentum, optim.momentum",
            fix="optim.momentum=0 (the correction takes its place), or strategy.compression_momentum=0",
        )
