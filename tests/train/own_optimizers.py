"""Defines optimizers and schedules as a user does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from examples.own_optimizer import Lion


class Preconditioned(torch.optim.Optimizer):
    """Multiplies a gradient from each side by the root of a running sum, as Shampoo does, with a state of odd shapes.

    A state has a Python number, None, and a list of matrices, which is empty for vectors.
    """

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0, power: float = 0.25):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "power": power})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            sizes = parameter.shape if parameter.ndim == 2 else ()
            options = {"dtype": parameter.dtype, "device": parameter.device}
            state |= {"count": 0, "unused": None, "sides": [1e-2 * torch.eye(size, **options) for size in sizes]}
        state["count"] += 1
        update = gradient
        if state["sides"]:
            for side, products in zip(state["sides"], (gradient @ gradient.T, gradient.T @ gradient), strict=True):
                side.add_(products)
            left, right = (_power(side, -group["power"]) for side in state["sides"])
            update = left @ gradient @ right
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"] / state["count"])


def _power(matrix: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ (values**exponent).diag() @ vectors.T


class Drawing(torch.optim.SGD):
    """Adds noise from torch's generator to each update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for value in group["params"]:
                value.add_(1e-3 * group["lr"] * torch.randn_like(value))


class CountsInGroup(Lion):
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1


class KeepsText(Lion):
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["note"] = "text"


class WarmsUpByItself(Lion):
    """Counts its updates in a private attribute."""

    _warm = 0

    def step(self) -> None:  # type: ignore[override]
        self._warm += 1
        super().step()


class CountsInTensor(Lion):
    """Counts its updates in a tensor of each group, which the first update makes."""

    def step(self) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["t"] = group.get("t", torch.zeros(())) + 1


class RemembersNorms(Lion):
    """Keeps a list of numbers, and a flag that says nothing about its state."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.norms: list[float] = []
        self._is_compiled = False

    def step(self) -> None:  # type: ignore[override]
        super().step()
        self._is_compiled = True
        self.norms.append(1.0)


class NeedsClosure(Lion):
    def step(self, closure: Callable[[], float]) -> None:  # type: ignore[override]
        closure()


def lion(params: Iterable[Any], lr: float, beta: float) -> Lion:
    return Lion(params, lr, (beta, beta))


def not_an_optimizer(params: Iterable[Any], lr: float) -> list[Any]:
    return list(params)


def to_zero(step: int, total_steps: int) -> float:
    return 1 - step / total_steps


def negative(step: int) -> float:
    return -1.0
