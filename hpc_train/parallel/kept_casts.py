"""Casts each matrix to the compute dtype once per optimizer step, for the strategies that do not shard parameters.

Autocast forgets its casts when its context ends, which is after the forward pass of a micro-batch. A recomputation in
the backward pass casts again, a frozen weight is cast at every use, and compiled code casts in every call. Here linear
layers and convolutions get copies of their weights and biases that live from the first micro-batch of a step to the end
of its last backward pass. The numbers are those of autocast: the gradient of a micro-batch is summed in the compute
dtype and then added to the parameter's. Norms still cast their vectors in each call, so that the gradients of several
calls (of the head for chunks of the loss) are summed in fp32. ZeRO gathers the parameters in the compute dtype, so
there is nothing to cast.

Autograd runs the newest of the nodes that are ready first. A cast would be older than every node of the later
micro-batches, so the gradients of all weights would wait in the compute dtype for the end of the backward pass, and
their reduction could not overlap with it. Therefore the casts have the highest priority.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpc_train.parallel.precision import compute_dtype

CASTS = "kept_casts"  # the attribute of a module with its casts: those of the weight and of the bias, if it has one
_FIRST = torch.iinfo(torch.int64).max  # the priority in autograd's queue; only the accumulation of gradients is higher


def _linear(module: nn.Linear, input: Tensor) -> Tensor:
    return F.linear(input, *_operands(module, input))


def _convolution(module: Any, input: Tensor) -> Tensor:
    result: Tensor = module._conv_forward(input, *_operands(module, input))
    return result


def _operands(module: Any, input: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns the casts of weight and bias, or the parameters if the caller has left autocast."""
    device = input.device.type
    casts: tuple[Tensor, Tensor | None] = module.kept_casts
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == casts[0].dtype:
        return casts
    return module.weight, module.bias


# by the forward of the class, since a subclass that overrides it may read its weight as it likes
_FORWARDS: dict[Any, Callable[[Any, Tensor], Tensor]] = {
    nn.Linear.forward: _linear,
    nn.Conv1d.forward: _convolution,
    nn.Conv2d.forward: _convolution,
    nn.Conv3d.forward: _convolution,
}


class KeptCasts:
    """Keeps the casts of the weights of a rank during a step.

    Args:
        parts: the modules that this rank trains, after they are wrapped and have their values.
        precision: the precision of the config; without autocast nothing is cast.
        sharded: whether the parameters are gathered in the compute dtype.
    """

    def __init__(self, parts: Iterable[nn.Module], precision: str, sharded: bool) -> None:
        self._dtype = None if sharded else compute_dtype(precision)
        modules = (module for part in parts for module in part.modules()) if self._dtype is not None else ()
        self._modules = [module for module in modules if _casts_weight(module)]

    @contextmanager
    def step(self) -> Iterator[None]:
        """Returns a context for all forward and backward passes of a step. Leave it before the weights change."""
        try:
            self._begin()
            yield
        finally:
            for module in self._modules:
                for name in (CASTS, "forward"):
                    module.__dict__.pop(name, None)

    def _begin(self) -> None:
        casts: dict[Tensor | None, Tensor | None] = {None: None}  # by parameter, since modules may share one
        for module in self._modules:
            own = [module._parameters[name] for name in ("weight", "bias")]
            for parameter in own:
                if parameter not in casts:
                    assert parameter is not None and self._dtype is not None
                    casts[parameter] = _cast(parameter, self._dtype)
            module.__dict__[CASTS] = tuple(casts[parameter] for parameter in own)
            module.__dict__["forward"] = MethodType(_FORWARDS[type(module).forward], module)


def _casts_weight(module: nn.Module) -> bool:
    """Returns whether ``module`` only uses its weight in the compute dtype, and the weight is a parameter itself."""
    weight = module._parameters.get("weight")
    known = type(module).forward in _FORWARDS and "forward" not in module.__dict__ and "bias" in module._parameters
    return known and weight is not None and weight.dtype == torch.float32


def _cast(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    copy = parameter.to(dtype)
    if copy.grad_fn is not None:
        copy.grad_fn._set_sequence_nr(_FIRST)  # type: ignore[attr-defined]
    return copy
