"""Updates parameters while the backward pass computes the gradients of others, and frees each gradient at once.

Autograd adds all contributions to a gradient before it hands it out, those of every use of a shared parameter as well,
and no node needs the value of the parameter after that. So a parameter can change although the backward pass goes on.

Whether all gradients of a step are finite is known after the last one. Here an update is left out from the first
gradient on that is not finite: a loss that is not finite makes all gradients so, and nothing changes; if a gradient
overflows on the way, the layers behind it have been updated and those before it are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from hpc_train.parallel.gradient_norm import norm_of, norms

Update = Callable[[Sequence[nn.Parameter], Tensor], None]  # (parameters with gradients, whether all so far are finite)


class UpdatesInBackward:
    """Calls an update for parameters whose gradients are final, in the steps that ``begin`` announces.

    Args:
        parameters: all parameters of this rank that train, which every rank holds whole.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device) -> None:
        self._parameters = list(parameters)
        self._device = device
        self._norms: dict[nn.Parameter, Tensor] = {}
        self._square = torch.zeros((), device=device)  # of the norm of all gradients so far
        self._update: Update | None = None

    @property
    def active(self) -> bool:
        """Returns whether the next backward pass updates parameters."""
        return self._update is not None

    def begin(self, update: Update) -> None:
        """Prepares a step that calls ``update``; without this call the gradients stay where they are."""
        self._update = update
        self._norms.clear()
        self._square = torch.zeros((), device=self._device)

    @torch.no_grad()
    def use(self, parameters: Sequence[nn.Parameter]) -> None:
        """Updates ``parameters``, whose gradients are those of the global batch, and frees the gradients."""
        given = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        if self._update is None or not given:
            return
        gradient_norms = norms([gradient for _, gradient in given])
        chosen = [parameter for parameter, _ in given]
        self._norms.update(zip(chosen, gradient_norms, strict=True))
        self._square = self._square + torch.stack(gradient_norms).square().sum()
        self._update(chosen, self._square.isfinite())
        for parameter in chosen:
            parameter.grad = None

    def end(self) -> Tensor:
        """Ends the step and returns the norm of its gradients, a scalar that is the same on every rank."""
        self._update = None
        assert all(parameter.grad is None for parameter in self._parameters), "a gradient was not used in the backward"
        return norm_of(
            [self._norms[parameter] for parameter in self._parameters if parameter in self._norms], self._device
        )
