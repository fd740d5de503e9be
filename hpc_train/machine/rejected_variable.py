"""Names the environment variable because of which torch cannot be imported or cannot join the process group.

Torch checks its variables when it is imported or when it creates a group, and raises an exception that may contain
the name, only the value, or neither, e.g. ``TORCH_LOGS``, ``TORCH_LOGS_OUT`` and ``TORCH_DIST_INIT_BARRIER``.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping

from hpc_train.errors import UserError

READ_BY_TORCH = ("TORCH", "PYTORCH", "GLOO_", "TP_", "NCCL_", "CUDA_", "HIP_", "OMP_", "MKL_", "KMP_", "ATEN_")
NAME = re.compile(r"\b[A-Z][A-Z0-9_]+\b")
SHORTEST, LONGEST = 3, 80  # characters: of a value that identifies its variable, and of a value in the message


def rejected_variable(error: BaseException, environment: Mapping[str, str]) -> UserError | None:
    """Returns the ``UserError`` for a variable of ``environment`` whose value torch has rejected with ``error``.

    Returns None if the error names no variable that is set, neither in its message nor in the line that raised it, and
    no value of one.
    """
    set_ = {name: value for name, value in environment.items() if name.startswith(READ_BY_TORCH)}
    message = str(error)
    frames = traceback.extract_tb(error.__traceback__)
    line = (frames[-1].line or "") if frames else ""
    named = [name for name in (*NAME.findall(message), *NAME.findall(line)) if name in set_]
    quoted = [name for name, value in set_.items() if len(value) >= SHORTEST and _contains(message, value)]
    name = next(iter((*named, *quoted)), None)
    if name is None:
        return None
    reason = " ".join(next((text for text in message.split("\n\n") if text.strip()), message).split())
    what = f"torch cannot use {name}={set_[name][:LONGEST]}: {type(error).__name__}: {reason:.300}"
    return UserError(
        what,
        where=f"{name} in the environment, or cluster.env",
        fix=f"unset {name}, or set it to a value that the documentation of torch names",
    )


INTEGERS = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def refuse_unreadable_sizes(environment: Mapping[str, str]) -> None:
    """Raises UserError for a variable of ``INTEGERS`` that is none: torch aborts the process then, without a reason."""
    for name in INTEGERS:
        value = environment.get(name)
        if value is not None and re.fullmatch(r"\s*[+-]?\d+.*", value, re.DOTALL) is None:  # what std::stoi reads
            raise UserError(
                f"{name}={value[:LONGEST]} is not an integer, at which torch aborts",
                where=f"{name} in the environment, or cluster.env",
                fix=f"unset {name}, or set it to a number of collectives, such as 2000",
            )


def _contains(message: str, value: str) -> bool:
    """Returns whether ``message`` contains ``value``, and not only as a part of a longer word."""
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", message) is not None
