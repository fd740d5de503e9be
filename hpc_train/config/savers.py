"""What saves memory, and what it does not go with."""

from __future__ import annotations

from hpc_train.config.errors import ConfigError
from hpc_train.config.layout import Layout
from hpc_train.config.schema import Config, GPTConfig

OFFLOADS_ALL = ("zero2", "zero3")


def check_savers(config: Config, layout: Layout) -> None:
    """
    Raises:
        ConfigError: what is asked for is not possible with this model or layout.
    """
    _check_loss_chunks(config, layout)
    _check_offload(config, layout)
    if config.optim.moments != "fp32" and config.optim.name != "adamw":
        raise ConfigError(
            f"{config.optim.name} has no moments that could be kept as {config.optim.moments}",
            where="optim.moments",
            mend="optim.moments=fp32, or optim=adamw",
        )


def _check_loss_chunks(config: Config, layout: Layout) -> None:
    chunks, length = config.train.loss_chunks, getattr(config.data, "sequence_length", None)
    if chunks > 1 and not isinstance(config.model, GPTConfig):
        raise ConfigError(
            "the loss is taken in chunks of a sequence of tokens, and this model has none",
            where="train.loss_chunks",
            mend="train.loss_chunks=1, or a gpt",
        )
    most = chunks if length is None else length // layout.tp
    if chunks > most:
        raise ConfigError(
            f"a rank's {most} tokens of a sequence cannot be cut into {chunks} chunks",
            where="train.loss_chunks",
            mend=f"train.loss_chunks={most} or fewer",
        )


def _check_offload(config: Config, layout: Layout) -> None:
    if config.strategy.offload != "all":
        return
    mend = "strategy.offload=optimizer, which goes with every strategy, or strategy=zero2 or zero3"
    if layout.dp == 1 or layout.data_parallel not in OFFLOADS_ALL:
        raise ConfigError(
            "parameters are in host memory only where they are gathered for each step, by ZeRO-2 or ZeRO-3",
            where="strategy.offload",
            mend=mend,
        )
    if layout.pp > 1 or layout.tp > 1:
        raise ConfigError(
            "tensor-parallel ranks and pipeline stages with tied weights exchange gradients, which the host's cannot",
            where="strategy.offload",
            mend=mend,
        )
