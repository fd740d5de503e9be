"""``strategy.compression``: what goes with it, and why the rest does not.

``train.activation_checkpointing``: what of a forward is computed again in the backward, and in which layers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpc_train.config.schema import Config
from hpc_train.errors import UserError

COMPRESSION = ("none", "fp16", "bf16", "powersgd", "topk", "auto")
CARRYING = ("powersgd", "topk", "auto")  # what they do not send is added to the next gradient
_WHERE = "strategy.compression"


def check_compression(config: Config, tp: int) -> None:
    """Raises UserError where gradients of several replicas cannot be compressed as asked, with the reason."""
    strategy, technique = config.strategy, config.strategy.compression
    if technique == "none":
        return
    if strategy.data_parallel not in ("ddp", "reduce"):
        raise UserError(
            f"{strategy.data_parallel} scatters gradients as FSDP sums them: no rank has a whole one to compress",
            where=f"strategy.data_parallel, {_WHERE}",
            fix=f"strategy.data_parallel=reduce, or {_WHERE}=none",
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
    """For techniques that carry what they did not send to the next step."""
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


KEY = "train.activation_checkpointing"
MODES = ("none", "full", "selective", "ops")
SELECTIVE_EVERY = 2  # layers, where ``selective`` says no number


@dataclass(frozen=True)
class Recomputation:
    """In every ``every``-th layer (by its global number, from 0 on; 0: in none).

    Attributes:
        keep_products: results of matrix products and attention are kept, and only the rest is computed again.
    """

    every: int = 0
    keep_products: bool = False

    def applies_to(self, layer: int) -> bool:
        return self.every > 0 and layer % self.every == 0


def parse_recomputation(text: str) -> Recomputation:
    """
    Raises:
        UserError: it is none of ``MODES``, nor ``selective:N``.
    """
    selective = re.fullmatch(r"selective(?::([1-9]\d*))?", text)
    if selective:
        return Recomputation(int(selective[1] or SELECTIVE_EVERY))
    if text in MODES:
        return Recomputation(0 if text == "none" else 1, keep_products=text == "ops")
    raise UserError(
        f"activation checkpointing {text!r} is unknown",
        where=KEY,
        fix="none, full, selective (every second layer), selective:N (every N-th) or ops (all but matrix products "
        "and attention)",
    )
