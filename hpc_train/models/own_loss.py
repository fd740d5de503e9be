"""Calls the loss of a custom model and checks its results: the sum of the losses of the samples, and a count.

Such a sum can be computed in parts, on any number of ranks and micro-batches. A contrastive loss cannot be computed in
parts, because it compares the samples of a batch. It declares this with a third parameter, ``gather``, with which each
rank computes the losses of its samples against the samples of all ranks. ``parallel/collectives.py`` implements
``gather``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hpc_train.data.custom import described
from hpc_train.errors import UserError

Gather = Callable[[Tensor], Tensor]
Loss = Callable[..., tuple[Tensor, Tensor | float]]


def alone(tensor: Tensor) -> Tensor:
    """Implements ``gather`` for a single rank, which has all samples."""
    return tensor


def mixes_samples(loss: Loss) -> bool:
    """Returns whether ``loss`` declares, by a parameter ``gather``, that it compares the samples of a batch."""
    return _has_gather(_function(loss))


@lru_cache(maxsize=64)
def _has_gather(function: Callable[..., Any]) -> bool:
    try:
        return "gather" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function in C
        return False


def _function(loss: Loss) -> Callable[..., Any]:
    bound = loss.forward if isinstance(loss, nn.Module) else loss
    function: Callable[..., Any] = getattr(bound, "__func__", bound)
    return function


def call_loss(loss: Loss, mixes: bool, outputs: Any, targets: Tensor, gather: Gather) -> tuple[Tensor, Tensor]:
    """Returns the sum and the count of ``loss`` as scalar tensors; a plain number becomes an fp64 tensor. ``mixes`` is
    the result of ``mixes_samples``. Raises UserError if the results are not a sum and a count."""
    result = loss(outputs, targets, gather=gather) if mixes else loss(outputs, targets)
    total, count = _checked(result, loss)
    has_gradient = any(isinstance(output, Tensor) and output.requires_grad for output in tree_leaves(outputs))
    if torch.is_grad_enabled() and not total.requires_grad and has_gradient:
        raise _wrong(loss, "returned a sum that is detached from the outputs of the model")
    return total, count


def _checked(result: Any, loss: Loss) -> tuple[Tensor, Tensor]:
    """Returns the sum and the count in ``result``, which ``loss`` has returned; see ``call_loss``."""
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise _wrong(loss, f"returned {described(result)}, not a sum and a count")
    total, count = result
    if not isinstance(total, Tensor) or total.ndim != 0:
        raise _wrong(loss, f"returned {described(total)} as the sum, which must be a scalar tensor")
    if isinstance(count, int | float):
        if not count >= 0:
            raise _wrong(loss, f"returned the count {count:g}, which must be 0 or more")
        return total, total.new_full((), count, dtype=torch.float64)
    if not isinstance(count, Tensor) or count.ndim != 0:
        raise _wrong(loss, f"returned {described(count)} as the count, which must be a number or a scalar tensor")
    if count.device != total.device:
        raise _wrong(loss, f"returned a sum on {total.device} and a count on {count.device}")
    return total, count


def check_global_count(total: float, count: float) -> None:
    """Checks the sums of a step over all ranks; raises UserError if the losses cannot be divided by their count."""
    if count < 0 or (count == 0 and math.isfinite(total) and total != 0):
        raise UserError(
            f"the sum of the losses over all ranks is {total:g}, but the sum of their counts is {count:g}",
            where="the method loss of the model",
            fix="return the number of samples, or the sum of their weights, as the count, which must be 0 or more",
        )


def place(loss: Loss) -> str:
    """Returns the name of a loss and where it is defined, for messages."""
    owner = loss if isinstance(loss, nn.Module) else getattr(loss, "__self__", None)
    function = inspect.unwrap(_function(loss))
    name = getattr(function, "__name__", type(loss).__name__)
    code = getattr(function, "__code__", None)
    if owner is not None:
        name = f"{type(owner).__qualname__}.{name}"
    if code is None:
        return name
    return f"{name} ({code.co_filename}:{code.co_firstlineno})"


def _wrong(loss: Loss, what: str) -> UserError:
    return UserError(
        f"the loss of the model {what}",
        where=place(loss),
        fix="return the sum (not the mean) of the samples' losses, and the number of samples or the sum of weights",
    )
