"""Parses and checks ``train.activation_offload``, and computes what it leaves on a device and adds to host memory.

It imports no torch; ``parallel.activation_offload`` moves the tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_train.config.schema import Config
from hpc_train.config.values import parse_recomputation
from hpc_train.errors import UserError
from hpc_train.units import parse_bytes

if TYPE_CHECKING:
    from hpc_train.plan.layout import Layout

_WHERE = "train.activation_offload"


def parse_activation_offload(text: str) -> int | None:
    """Returns the size in bytes from which saved tensors are kept in host memory; None if none are.

    Raises:
        UserError: ``text`` is neither none nor a size.
    """
    size = None if text == "none" else parse_bytes(text)
    if text == "none" or size:
        return size
    raise UserError(
        f"{_WHERE} is {text!r}, which is not a size", where=_WHERE, fix=f"{_WHERE}=1MiB, or none to offload nothing"
    )


def check_activation_offload(config: Config, layout: Layout) -> None:
    """
    Raises:
        UserError: another option does not support activation offload.
    """
    if parse_activation_offload(config.train.activation_offload) is None:
        return
    if config.train.compile:
        raise UserError(
            f"{_WHERE} does not support train.compile: a compiled layer cannot hand over the tensors that it saves",
            where=f"{_WHERE}, train.compile",
            fix=f"train.compile=false, or {_WHERE}=none",
        )
    asked = config.train.activation_checkpointing
    if parse_recomputation(asked).budget is not None:
        raise UserError(
            f"train.activation_checkpointing={asked} is a budget for what layers keep on a device, which {_WHERE} moves "
            "to host memory",
            where=f"train.activation_checkpointing, {_WHERE}",
            fix=f"train.activation_checkpointing=none or full, or {_WHERE}=none",
        )
