"""Names the sample whose target is none of the model's classes, or the dtypes that the model does not accept, when they
make a pass fail.

On CPUs torch's losses name the target in an IndexError, and compiled code raises a RuntimeError that does not name it.
On a GPU such a target is an assertion of a kernel (``Failure.KERNEL``), after which no tensor can be read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from hpc_train.data.dataset import IGNORED, Batch, leaves
from hpc_train.errors import UserError
from hpc_train.models.model import Model


@contextmanager
def refusing_wrong_targets(model: nn.Module, micro_batches: Sequence[Batch]) -> Iterator[None]:
    """Encloses a pass of ``model`` over ``micro_batches``.

    Raises:
        UserError: a target in them, or their dtypes, are the cause of the error in the block.
    """
    try:
        yield
    except (IndexError, RuntimeError) as error:
        if micro_batches:
            _refuse_dtypes(error, micro_batches[0])
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
            parts = model.head.modules() if isinstance(model, Model) and model.head is not None else ()
            widths = [part.out_features for part in parts if isinstance(part, nn.Linear)]
            if not widths:
                return None
            # the last matrix of the head has one output for each class
            return lambda targets: (targets != IGNORED) & ((targets < 0) | (targets >= widths[-1]))
        error = error.__cause__
    return None


_NO_LABELS = re.compile(r"expected (target dtype to be|scalar type) Long\b")
_NO_INDICES = re.compile(r"for argument #1 'indices' to have one of the following scalar types: Long")
_NO_FLOATS = re.compile(r"(same dtype|should be the same|expected scalar type|mixed dtype)", re.IGNORECASE)
_INTEGERS = re.compile(r"\b(torch\.)?(Long|Int|Short|Char|Byte|Bool|long|int|short|char|unsigned char|bool)(Tensor)?\b")


def _refuse_dtypes(error: BaseException, micro: Batch) -> None:
    """Raises UserError if torch's ``error`` is about the dtype of the inputs or of the targets of ``micro``."""
    message = str(error).partition("\n")[0]
    inputs = {value.dtype for value in leaves(micro.inputs)}
    targets = {value.dtype for value in leaves(micro.targets)}
    has_float_inputs = any(dtype.is_floating_point for dtype in inputs)
    part = "inputs"
    if _NO_LABELS.search(message) and any(dtype.is_floating_point for dtype in targets):
        part = "targets"
        fix = "return integers as class labels, or use model.loss=mse for other targets"
    elif _NO_INDICES.search(message) and has_float_inputs:
        fix = "return integers as token ids"
    elif inputs and not has_float_inputs and _NO_FLOATS.search(message) and _INTEGERS.search(message):
        fix = "return floating-point inputs, such as pixels divided by 255"
    else:
        return
    dtypes = targets if part == "targets" else inputs
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    raise UserError(
        f"the model or its loss does not accept the {part} of the data, which are {names}: {message}",
        where="data, model",
        fix=fix,
    ) from error


def _refuse(error: BaseException, micro: Batch, is_wrong: IsWrong) -> None:
    """Raises UserError if ``micro`` has such a target; the loss may have made its own."""
    for targets in leaves(micro.targets):
        if targets.is_floating_point() or not is_wrong(targets).any():
            continue
        place = is_wrong(targets).nonzero()[0].tolist()
        fix = f"number the classes from 0, set a target that does not count to {IGNORED}, or add outputs to the model"
        if micro.samples:
            sample = f"sample {micro.samples[place[0]]}"
        else:
            sample = f"row {place[0]} of a micro-batch"
        raise UserError(
            f"the target of {sample} is {int(targets[tuple(place)])}, which is not one of the model's classes",
            where="data, model",
            fix=fix,
        ) from error
