"""What a technique carries from one step to the next for each parameter: what was not sent, above all."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Carried:
    """One tensor per parameter. What a step leaves counts only once the step is known to be taken."""

    def __init__(self, tensors: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        self._held = dict(tensors)
        self._left: dict[nn.Parameter, Tensor] = {}

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._held

    def __getitem__(self, parameter: nn.Parameter) -> Tensor:
        return self._held[parameter]

    def leave(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Notes what this step leaves; ``value`` is not copied."""
        self._left[parameter] = value.view_as(self._held[parameter])

    def settle(self, finite: Tensor) -> None:
        """Takes over what the step has left where ``finite``, a scalar bool on the device; else nothing changes."""
        for parameter, value in self._left.items():
            held = self._held[parameter]
            held.copy_(torch.where(finite, value, held))
        self._left.clear()


def zeros(parameters: Iterable[nn.Parameter]) -> Carried:
    return Carried((p, torch.zeros(p.shape, dtype=p.dtype, device=p.device)) for p in parameters)
