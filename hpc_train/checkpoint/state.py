"""The state of a run as one flat dict of global names, the same under every layout.

``model.NAME`` is a parameter or a persistent buffer, ``optim.NAME.KEY`` a tensor of the optimizer's state for that
parameter, with NAME as the whole model calls it. A rank holds the part of the names, and of each DTensor the shard,
that its place in the layout gives it; a tied copy stands under its canonical name. What gradient compression carries
from step to step stands under ``compression.``; see ``carried.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hpc_train.checkpoint.carried import carried_state
from hpc_train.config.errors import ConfigError
from hpc_train.parallel.engine import Engine
from hpc_train.parallel.mesh import Mesh

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
        ConfigError: names all kinds of difference at once.
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
        raise ConfigError(
            "the checkpoint is of another model or optimizer:\n  " + "\n  ".join(problems),
            where=where,
            mend="the model and optimizer that it was saved with, or another run.name to begin at step 0",
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
