"""What gradient compression carries from step to step, in checkpoints.

``compression.NAME.residual.SLOT`` is what one replica still owes of the gradient of parameter NAME; what counts is the
sum over the slots. In another layout each slot goes to one of the new ones (slot modulo their number), which adds up
what it gets, so no gradient is lost or counted twice. ``compression.NAME.basis`` is the same on all replicas.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from hpc_train.parallel.engine import Engine

if TYPE_CHECKING:
    from hpc_train.checkpoint.state import TensorShape

PREFIX = "compression."
_SLOT = re.compile(r"(.+)\.(\d+)")
_Value = TypeVar("_Value")


def carried_state(engine: Engine) -> dict[str, Tensor]:
    """What this rank carries, under the names of a checkpoint."""
    state = {}
    for compression in engine.compressions():
        for held in compression.carried():
            state[f"{PREFIX}{held.name}.{held.key}.{held.slot}"] = held.tensor
        state |= {f"{PREFIX}{name}": tensor for name, tensor in compression.agreed()}
    return state


def without_carried(stored: Mapping[str, _Value]) -> dict[str, _Value]:
    return {name: value for name, value in stored.items() if not name.startswith(PREFIX)}


class CarriedLoad:
    """What to load so that this rank carries its share of what the ranks of a checkpoint did.

    Args:
        stored: the tensors of the checkpoint; one without compression leaves nothing to be carried.

    Attributes:
        targets: by name, to be loaded into. Then call ``finish``.
    """

    def __init__(self, engine: Engine, stored: Mapping[str, TensorShape]) -> None:
        self.targets: dict[str, Tensor] = {}
        self._sums: list[tuple[Tensor, list[Tensor]]] = []
        slots = _slots(stored)
        for compression in engine.compressions():
            for held in compression.carried():
                head = f"{PREFIX}{held.name}.{held.key}"
                mine = [f"{head}.{slot}" for slot in slots.get(head, ()) if slot % held.slots == held.slot]
                parts = [torch.empty_like(held.tensor) for _ in mine]
                self.targets |= zip(mine, parts, strict=True)
                self._sums.append((held.tensor, parts))
            for name, tensor in compression.agreed():
                found = stored.get(f"{PREFIX}{name}")
                if found is not None and found.shape == tuple(tensor.shape):
                    self.targets[f"{PREFIX}{name}"] = tensor

    def finish(self) -> None:
        for tensor, parts in self._sums:
            tensor.zero_()
            for part in parts:
                tensor.add_(part)


def _slots(stored: Mapping[str, object]) -> dict[str, list[int]]:
    """``compression.NAME.KEY`` -> the slots that a checkpoint has of it."""
    found: dict[str, list[int]] = {}
    for name in stored:
        match = _SLOT.fullmatch(name) if name.startswith(PREFIX) else None
        if match:
            found.setdefault(match[1], []).append(int(match[2]))
    return {head: sorted(slots) for head, slots in found.items()}
