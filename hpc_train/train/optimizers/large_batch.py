"""Optimizers for large batches: LARS and LAMB, whose step of a parameter is in proportion to the norm of the parameter.

The norms are those of the whole parameter, so one of the ranks that share it updates it (``held.WholeTensor``): the
result is that of one process under every strategy. Parameters of less than two dimensions (biases, norms) are updated
without the ratio of norms, as in the authors' experiments. The host does not wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


class Lars(torch.optim.Optimizer):
    """SGD with momentum, with LARS (You et al. 2017, arXiv:1708.03888).

    The gradient with weight decay of a parameter w is scaled by ``trust`` |w| / (|gradient| + weight_decay |w|). The
    learning rate is applied outside of the momentum, as in ``torch.optim.SGD``.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, weight_decay: float = 0.0, momentum: float = 0.9, trust: float = 1e-3
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "trust": trust})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters, gradients = with_gradients(group)
            if not parameters:
                continue
            decayed = torch._foreach_add(gradients, parameters, alpha=group["weight_decay"])
            weights = torch._foreach_norm(parameters)
            sums = torch._foreach_norm(gradients)
            torch._foreach_add_(sums, weights, alpha=group["weight_decay"])
            scale_matrices(decayed, parameters, weights, sums, group["trust"])
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter]["momentum"] = torch.zeros_like(parameter)
            momenta = [self.state[parameter]["momentum"] for parameter in parameters]
            torch._foreach_mul_(momenta, group["momentum"])
            torch._foreach_add_(momenta, decayed)
            torch._foreach_add_(parameters, momenta, alpha=-group["lr"])


class Lamb(torch.optim.Optimizer):
    """Adam with LAMB (You et al. 2020, arXiv:1904.00962, algorithm 2).

    The update of a parameter w, Adam's with weight decay, is scaled by |w| / |update|.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        weight_decay: float = 0.0,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-6,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": tuple(betas), "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters, gradients = with_gradients(group)
            if not parameters:
                continue
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter]["step"] = torch.zeros((), device=parameter.device)
                    self.state[parameter]["first"] = torch.zeros_like(parameter)
                    self.state[parameter]["second"] = torch.zeros_like(parameter)
            states = [self.state[parameter] for parameter in parameters]
            steps = [state["step"] for state in states]
            firsts = [state["first"] for state in states]
            seconds = [state["second"] for state in states]
            beta1, beta2 = group["betas"]
            torch._foreach_add_(steps, 1)
            torch._foreach_lerp_(firsts, gradients, 1 - beta1)
            torch._foreach_mul_(seconds, beta2)
            torch._foreach_addcmul_(seconds, gradients, gradients, value=1 - beta2)
            roots = torch._foreach_div(seconds, bias_corrections(beta2, steps))
            torch._foreach_sqrt_(roots)
            torch._foreach_add_(roots, group["eps"])
            updates = torch._foreach_div(firsts, bias_corrections(beta1, steps))
            torch._foreach_div_(updates, roots)
            torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
            scale_matrices(updates, parameters, torch._foreach_norm(parameters), torch._foreach_norm(updates))
            torch._foreach_add_(parameters, updates, alpha=-group["lr"])


def with_gradients(group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the parameters of a group that have gradients, and these gradients."""
    parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
    return parameters, [parameter.grad for parameter in parameters]


def scale_matrices(
    updates: Sequence[Tensor],
    parameters: Sequence[Tensor],
    norms: Sequence[Tensor],
    of_updates: Sequence[Tensor],
    factor: float = 1.0,
) -> None:
    """Multiplies updates of parameters of at least two dimensions by ``factor`` times the quotient of the two norms,
    or by ``factor`` alone where a norm is 0: for a parameter of zeros, or without a gradient."""
    above = torch.stack([*norms])
    below = torch.stack([*of_updates])
    ratios = torch.where((above > 0) & (below > 0), above / below, 1.0).mul_(factor).unbind()
    matrices = [number for number, parameter in enumerate(parameters) if parameter.ndim >= 2]
    if matrices:
        torch._foreach_mul_([updates[number] for number in matrices], [ratios[number] for number in matrices])


def bias_corrections(beta: float, steps: Sequence[Tensor]) -> list[Tensor]:
    """Returns 1 - beta^step for each step."""
    corrections = torch._foreach_pow(beta, [*steps])
    torch._foreach_mul_(corrections, -1)
    torch._foreach_add_(corrections, 1)
    return [*corrections]
