"""Builds the exchange of compressed gradients from the config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.config.schema import StrategyConfig
from hpc_train.parallel.exchange import Dense, Exchange, PowerSGD, TopK


@dataclass(frozen=True)
class LocalTensor:
    """Holds the local compression state of a rank for one parameter.

    Each rank that sends a gradient of the parameter has a slot. Only the sum over all slots matters.

    Attributes:
        name: the canonical name of the parameter.
        key: ``residual``.
        slot: the slot of this rank, in [0, ``slots``).
    """

    name: str
    key: str
    tensor: Tensor
    slot: int
    slots: int


class Compression:
    """Holds the exchange of compressed gradients of one module.

    Args:
        parameters: name -> parameter of one module; a tied copy has its own name.
        tied: alias -> canonical name in the whole model.
        cut: whether the model is cut into stages, each of which may have a copy of a tied parameter.
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
        self.exchange = make_exchange(strategy.compression, strategy, parameters, group)

    @torch.no_grad()
    def commit(self, finite: Tensor) -> None:
        self.exchange.commit(finite)

    def local_state(self) -> Iterator[LocalTensor]:
        """Yields the state that differs between ranks, such as residuals."""
        rank, ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        for own, parameter in self._parameters.items():
            name = self._tied.get(own, own)
            copies = [own]
            if self._cut:
                copies = [name, *(alias for alias, canonical in self._tied.items() if canonical == name)]
            slot = copies.index(own) * ranks + rank
            for key, tensor in self.exchange.local_state(parameter).items():
                yield LocalTensor(name, key, tensor, slot, ranks * len(copies))

    def shared_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the state that is the same on all ranks: ``NAME.KEY``, where a tied copy has its own name, and a
        tensor."""
        for name, parameter in self._parameters.items():
            for key, tensor in self.exchange.shared_state(parameter).items():
                yield f"{name}.{key}", tensor


def make_exchange(
    technique: str, strategy: StrategyConfig, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup
) -> Exchange:
    """Returns the exchange of ``technique``, a value of ``strategy.compression``."""
    if technique == "topk":
        return TopK(parameters.values(), group, strategy.compression_share)
    if technique == "powersgd":
        return PowerSGD(parameters, group, strategy.compression_rank)
    dtypes = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}
    return Dense(group, dtypes[technique])
