"""Implements ``train.debug=true``, which finds the first module output or gradient that is not finite.

Forward hooks check every output, autograd's anomaly mode checks every gradient, and after the backward pass the
gradients of all parameters are checked. Every check waits for the device, which slows training down.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from hpc_train.data.dataset import StepBatch
from hpc_train.models.model import canonical_name
from hpc_train.parallel.engine import Engine, StepResult, WrappedEngine

_ANOMALY = "returned nan values"  # part of autograd's message


class DebuggedEngine(WrappedEngine):
    """Wraps ``engine`` and checks all outputs and gradients.

    ``train_step`` raises FloatingPointError with the rank, step and module or parameter of the first value that is not
    finite.

    Args:
        detects_anomaly: whether to find the function of the backward pass with autograd's anomaly mode, which does not
            support the DTensors of tensor and expert parallelism.
    """

    def __init__(self, engine: Engine, rank: int, detects_anomaly: bool) -> None:
        super().__init__(engine)
        self._rank = rank
        self._step = 0
        if detects_anomaly:
            torch.autograd.set_detect_anomaly(True)
        for part in engine.parts:
            for name, module in part.named_modules():
                module.register_forward_hook(partial(self._check_output, canonical_name(name)))

    def train_step(self, step: int, batch: StepBatch, loss_scale: Tensor | None = None) -> StepResult:
        self._step = step + 1
        try:
            result = self._engine.train_step(step, batch, loss_scale)
        except RuntimeError as error:
            if _ANOMALY not in str(error):
                raise
            message = f"in the backward pass: {error} The log above shows the traceback of its forward call"
            raise FloatingPointError(self._locate(message)) from error
        bad = _not_finite((name, value.grad) for name, value in self.named_parameters().items())
        if bad:
            raise FloatingPointError(self._locate(f"the gradients of {join_names(bad)} are not finite"))
        return result

    def _check_output(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Raises FloatingPointError if ``output`` is not finite. Hooks of inner modules run first, so the message names
        the innermost module."""
        if not module.training or not _not_finite(("output", leaf) for leaf in tree_leaves(output)):
            return
        inputs_are = "not finite" if _not_finite(("input", leaf) for leaf in tree_leaves(inputs)) else "finite"
        parameters = _not_finite(module.named_parameters())
        parameters_are = f"{join_names(parameters)} are not finite" if parameters else "are finite"
        raise FloatingPointError(
            self._locate(
                f"the output of {name or 'the model'} ({type(module).__name__}) is not finite; "
                f"its inputs are {inputs_are}; its parameters {parameters_are}"
            )
        )

    def _locate(self, message: str) -> str:
        return f"rank {self._rank}, step {self._step}: {message}"


def _not_finite(values: Iterable[tuple[str, Any]]) -> list[str]:
    """Returns the names of the tensors with an element that is not finite on this rank."""
    names = []
    for name, value in values:
        if isinstance(value, Tensor):
            local = value.to_local() if isinstance(value, DTensor) else value
            if local.is_floating_point() and not local.detach().isfinite().all():
                names.append(name)
    return names


def join_names(names: list[str]) -> str:
    """Returns the first four ``names`` and the number of the others, for messages."""
    text = ", ".join(names[:4])
    if len(names) > 4:
        text += f" and {len(names) - 4} more"
    return text
