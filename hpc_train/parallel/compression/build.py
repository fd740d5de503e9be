"""Builds the exchange of compressed gradients of one module from the config, and names its state for checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.config.schema import StrategyConfig
from hpc_train.parallel.compression.exchange import Dense, Exchange
from hpc_train.parallel.compression.powersgd import PowerSGD
from hpc_train.parallel.compression.topk import TopK


@dataclass(frozen=True)
class CarriedTensor:
    """A tensor that a rank carries for its share of the gradient of a parameter.

    All ranks that send a gradient of one parameter have a slot each; what counts is the sum over the slots.

    Attributes:
        name: of the parameter, canonical.
        key: ``residual`` or ``velocity``.
        slot: of this rank, in [0, ``slots``).
    """

    name: str
    key: str
    tensor: Tensor
    slot: int
    slots: int


class Compression:
    """The exchange of each step: dense for ``compression_warmup_steps``, then the technique of the config.

    Args:
        parameters: of one module, by canonical name, a tied copy by its own.
        tied: alias -> canonical name, of the whole model.
        cut: the model is cut into stages, each of which may have a copy of a tied parameter.
    """

    def __init__(
        self,
        strategy: StrategyConfig,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        tied: Mapping[str, str],
        cut: bool,
    ) -> None:
        self._parameters, self._group, self._tied, self._cut = parameters, group, tied, cut
        self._warmup_steps = strategy.compression_warmup_steps
        self._dense: Exchange = Dense(group)
        self._compressed = make_exchange(strategy.compression, strategy, parameters, group)

    def exchange(self, step: int) -> Exchange:
        return self._dense if step < self._warmup_steps else self._compressed

    @torch.no_grad()
    def commit(self, finite: Tensor) -> None:
        self._compressed.commit(finite)

    def carried(self) -> Iterator[CarriedTensor]:
        rank, ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        for own, parameter in self._parameters.items():
            name = self._tied.get(own, own)
            copies = [own]
            if self._cut:
                copies = [name, *(alias for alias, canonical in self._tied.items() if canonical == name)]
            slot = copies.index(own) * ranks + rank
            for key, tensor in self._compressed.carried(parameter).items():
                yield CarriedTensor(name, key, tensor, slot, ranks * len(copies))

    def agreed(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the state that is the same on all ranks: ``NAME.KEY`` (a tied copy by its own name) and the tensor."""
        for name, parameter in self._parameters.items():
            for key, tensor in self._compressed.agreed(parameter).items():
                yield f"{name}.{key}", tensor


def make_exchange(
    technique: str, strategy: StrategyConfig, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup
) -> Exchange:
    """Returns the exchange of ``technique``, a value of ``strategy.compression`` other than ``auto``."""
    if technique == "topk":
        return TopK(parameters.values(), group, strategy.compression_share, strategy.compression_momentum)
    if technique == "powersgd":
        return PowerSGD(parameters, group, strategy.compression_rank)
    dtypes = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}
    return Dense(group, dtypes[technique])
