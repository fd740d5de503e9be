"""An optimizer and a learning rate schedule of your own: Lion (Chen et al. 2023, arXiv:2302.06675), and a square root.

    python -m hpc_train +strategy=zero2 optim._target_=examples.own_optimizer.Lion optim.lr=3e-4 \
        optim.schedule=examples.own_optimizer.inverse_square_root
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """Moves each element by the learning rate, in the direction of the sign of a mean of its gradients.

    Each element depends on itself, its gradient and its state alone, so ``optim.elementwise=true`` lets each rank of
    ZeRO update its shard. Without it one rank updates the whole parameter, with the same result.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:  # Lightning computes the gradients in it; hpc_train calls step()
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]  # everything that a checkpoint must keep belongs here
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        first, second = group["betas"]
        direction = state["momentum"].lerp(gradient, 1 - first).sign_()
        parameter.mul_(1 - group["lr"] * group["weight_decay"])  # 0 for norms and biases: hpc_train sets it
        parameter.sub_(direction, alpha=group["lr"])
        state["momentum"].lerp_(gradient, 1 - second)


def inverse_square_root(step: int, warmup: int = 10) -> float:
    """Returns the factor of ``optim.lr`` for ``step`` (0, 1, ...): a linear rise, then a fall with its square root."""
    return min((step + 1) / warmup, math.sqrt(warmup / (step + 1)))
