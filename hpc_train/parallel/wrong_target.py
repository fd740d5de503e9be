"""Names the sample whose target is none of the model's classes, when the loss fails because of it.

On CPUs torch's losses name the target in an IndexError, and compiled code raises a RuntimeError that does not name it.
On a GPU such a target is an assertion of a kernel (``Failure.KERNEL``), after which no tensor can be read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hpc_train.data.dataset import IGNORED, Batch, leaves
from hpc_train.errors import UserError
from hpc_train.models.model import Model


@contextmanager
def refusing_wrong_targets(model: nn.Module, micro_batches: Sequence[Batch]) -> Iterator[None]:
    """Encloses a pass of ``model`` over ``micro_batches``.

    Raises:
        UserError: a target in them is the cause of the error in the block.
    """
    try:
        yield
    except (IndexError, RuntimeError) as error:
        is_wrong = _condition(error, model)
        if is_wrong is not None:
            for micro in micro_batches:
                _refuse(error, micro, is_wrong)
        raise


IsWrong = Callable[[Tensor], Tensor]


def _condition(error: BaseException | None, model: nn.Module) -> IsWrong | None:
    """Returns the targets that ``error`` is about; None if it is another error."""
    while error is not None:  # torch's pipeline schedules raise an error of their own from that of a stage
        if isinstance(error, IndexError) and (named := re.fullmatch(r"Target (-?\d+) is out of bounds\.", str(error))):
            target = int(named[1])
            return lambda targets: targets == target
        if isinstance(error, RuntimeError) and re.search(r"\bindex\b.*out of bounds", str(error)):
            return _outside(_classes(model))
        error = error.__cause__
    return None


def _outside(classes: int | None) -> IsWrong | None:
    if classes is None:
        return None
    return lambda targets: (targets != IGNORED) & ((targets < 0) | (targets >= classes))


def _classes(model: nn.Module) -> int | None:
    """Returns the outputs of the last matrix of the head; None if the model has no head, or one without matrices."""
    head = model.head if isinstance(model, Model) else None
    found = [] if head is None else [part.out_features for part in head.modules() if isinstance(part, nn.Linear)]
    return found[-1] if found else None


def _refuse(error: BaseException, micro: Batch, is_wrong: IsWrong) -> None:
    """Raises UserError if ``micro`` has such a target; the loss may have made its own."""
    for targets in leaves(micro.targets):
        found = is_wrong(targets).nonzero() if not targets.is_floating_point() else torch.empty(0)
        if not len(found):
            continue
        place = found[0].tolist()
        fix = f"number the classes from 0, set a target that does not count to {IGNORED}, or add outputs to the model"
        sample = f"sample {micro.samples[place[0]]}" if micro.samples else f"row {place[0]} of a micro-batch"
        raise UserError(
            f"the target of {sample} is {int(targets[tuple(place)])}, which is not one of the model's classes",
            where="data, model",
            fix=fix,
        ) from error
