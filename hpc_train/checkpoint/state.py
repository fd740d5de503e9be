"""The state of a run as one flat dict of global names, the same under every layout.

``model.NAME`` is a parameter or a persistent buffer, ``optim.NAME.KEY`` a tensor of the optimizer's state for that
parameter, with NAME as the whole model calls it. A rank holds the part of the names, and of each DTensor the shard,
that its place in the layout gives it; a tied copy stands under its canonical name. What gradient compression carries
from step to step stands under ``compression.``; see ``carried.py``.

What gradient compression carries from step to step, in checkpoints.

``compression.NAME.residual.SLOT`` is what one replica still owes of the gradient of parameter NAME; what counts is the
sum over the slots. In another layout each slot goes to one of the new ones (slot modulo their number), which adds up
what it gets, so no gradient is lost or counted twice. ``compression.NAME.basis`` is the same on all replicas.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hpc_train.errors import UserError
from hpc_train.parallel.engine import Engine
from hpc_train.parallel.mesh import Mesh

if TYPE_CHECKING:
    pass


SHOWN = 8  # names of a kind in a message


class OptimizerState(Protocol):
    """What a checkpoint needs of an optimizer."""

    def named_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Canonical parameter name -> key -> tensor; what is loaded into these counts after ``loaded``."""

    def loaded(self) -> None:
        """After a checkpoint was loaded into the parameters, and perhaps into ``named_state``."""


def training_state(engine: Engine, optimizer: OptimizerState) -> dict[str, Tensor]:
    """Everything that this rank holds; loading into these tensors restores it."""
    state = {f"model.{name}": parameter.detach() for name, parameter in engine.named_parameters().items()}
    state |= {f"model.{name}": buffer for name, buffer in engine.named_buffers().items()}
    for name, tensors in optimizer.named_state().items():
        state |= {f"optim.{name}.{key}": tensor for key, tensor in tensors.items()}
    return state


def saved_state(engine: Engine, optimizer: OptimizerState, mesh: Mesh) -> dict[str, Tensor]:
    """What this rank hands to a save. Buffers may differ between replicas, so those of one replica are taken."""
    state = training_state(engine, optimizer) | carried_state(engine)
    if mesh.dp_rank == 0 and mesh.tp_rank == 0:
        return state
    buffers = {f"model.{name}" for name in engine.named_buffers()}
    return {name: tensor for name, tensor in state.items() if name not in buffers}


@dataclass(frozen=True)
class TensorShape:
    """Global shape and type of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


def shapes(state: Mapping[str, Tensor]) -> dict[str, TensorShape]:
    return {name: TensorShape(tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}


def stored_shapes(metadata: Metadata) -> dict[str, TensorShape]:
    """Of the tensors in a checkpoint."""
    found = metadata.state_dict_metadata.items()
    return {
        name: TensorShape(tuple(entry.size), entry.properties.dtype)
        for name, entry in found
        if isinstance(entry, TensorStorageMetadata)
    }


def check_match(stored: Mapping[str, TensorShape], wanted: Mapping[str, TensorShape], where: str) -> None:
    """Compares a checkpoint with the state of all ranks together, before a live tensor is touched.

    Raises:
        UserError: names all kinds of difference at once.
    """
    different = [
        f"{name}: {stored[name]} in the checkpoint, {wanted[name]} in the run"
        for name in wanted
        if name in stored and not _loads_into(stored[name], wanted[name], converts=name.startswith("optim."))
    ]
    problems = [
        *_listed("missing in the checkpoint", [name for name in wanted if name not in stored]),
        *_listed("only in the checkpoint", [name for name in stored if name not in wanted]),
        *_listed("not the same shape or type", different),
    ]
    if problems:
        raise UserError(
            "the checkpoint is of another model or optimizer:\n  " + "\n  ".join(problems),
            where=where,
            fix="the model and optimizer that it was saved with, or another run.name to begin at step 0",
        )


def _loads_into(stored: TensorShape, wanted: TensorShape, converts: bool) -> bool:
    """Moments may be kept in another format than the one they were saved in; parameters may not."""
    numbers = stored.dtype.is_floating_point and wanted.dtype.is_floating_point
    return stored == wanted or (converts and numbers and stored.shape == wanted.shape)


def _listed(kind: str, names: Iterable[str]) -> list[str]:
    listed = sorted(names)
    if not listed:
        return []
    more = f", and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return [f"{kind} ({len(listed)}): {', '.join(listed[:SHOWN])}{more}"]


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
