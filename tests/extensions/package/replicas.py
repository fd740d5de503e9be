"""The part of the kind that needs torch; imported on workers only."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from hpc_train.config.schema import StrategyConfig
from hpc_train.parallel.mesh import Mesh


class SummedAfterwards:
    """Replicas whose gradients are summed after the last backward."""

    loss_factor = 1
    compression = None

    def __init__(self, module: nn.Module, mesh: Mesh, strategy: StrategyConfig, **_: object) -> None:
        self.module, self._group = module, mesh.group("dp")

    def begin(self, step: int, backwards: int) -> None:
        pass

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def backward_done(self) -> None:
        pass

    def finish(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad, group=self._group)

    def evaluated(self) -> None:
        pass
