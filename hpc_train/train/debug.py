"""``train.debug=true``: the first module whose output is not finite, or else the first gradient, with its rank.

Forward hooks look at every output, autograd's anomaly mode at every gradient on its way, and when both found nothing
the gradients of all parameters are looked at after the backward. All of it waits for the device: it is slow.
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
from hpc_train.parallel.engine import Engine, StepResult, WrappedEngine
from hpc_train.parallel.naming import canonical_name

_ANOMALY = "returned nan values"  # what autograd's message has in it


class DebuggedEngine(WrappedEngine):
    """``engine``, with a look at everything.

    Raises (from ``train_step``):
        FloatingPointError: something was not finite; names rank, step and module or parameter.
    """

    def __init__(self, engine: Engine, rank: int) -> None:
        super().__init__(engine)
        self._rank = rank
        self._step = 0
        torch.autograd.set_detect_anomaly(True)
        for part in engine.parts:
            for name, module in part.named_modules():
                module.register_forward_hook(partial(self._look, canonical_name(name)))

    def train_step(self, step: int, batch: StepBatch, loss_scale: Tensor | None = None) -> StepResult:
        self._step = step + 1
        try:
            result = self._engine.train_step(step, batch, loss_scale)
        except RuntimeError as error:
            if _ANOMALY not in str(error):
                raise
            message = f"in the backward: {error} The lines of its forward stand above in the log"
            raise FloatingPointError(self._place(message)) from error
        bad = _not_finite((name, value.grad) for name, value in self.named_parameters().items())
        if bad:
            raise FloatingPointError(self._place(f"the gradients of {_few(bad)} are not finite"))
        return result

    def _look(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """The hook of a module runs before that of the module around it: the first to complain is the innermost."""
        if not module.training or not _not_finite(("output", leaf) for leaf in tree_leaves(output)):
            return
        parameters = _not_finite(module.named_parameters())
        came_in = _not_finite(("input", leaf) for leaf in tree_leaves(inputs))
        what = f"the output of {name or 'the model'} ({type(module).__name__}) is not finite; "
        what += "its inputs were not either" if came_in else "its inputs were"
        what += f"; its parameters {_few(parameters)} are not" if parameters else "; its parameters are"
        raise FloatingPointError(self._place(what))

    def _place(self, message: str) -> str:
        return f"rank {self._rank}, step {self._step}: {message}"


def _not_finite(values: Iterable[tuple[str, Any]]) -> list[str]:
    """Names of the tensors of which an element is not finite, on this rank."""
    return [name for name, value in values if isinstance(value, Tensor) and not _is_finite(value)]


def _is_finite(value: Tensor) -> bool:
    local = value.to_local() if isinstance(value, DTensor) else value
    return not local.is_floating_point() or bool(local.detach().isfinite().all())


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
