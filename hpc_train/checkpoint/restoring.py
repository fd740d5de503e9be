"""Loads a verified checkpoint of any layout into the model and optimizer of the current layout. Collective.

An evaluation loads only the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from hpc_train.checkpoint.agreement import lowest, on_first
from hpc_train.checkpoint.extra_state import ExtraLoad
from hpc_train.checkpoint.manifest import BadCheckpoint, Manifest
from hpc_train.checkpoint.reader import SafeReader
from hpc_train.checkpoint.state import (
    CompressionLoad,
    ModelState,
    OptimizerState,
    TensorShape,
    check_match,
    gather_shapes,
    missing_in,
    model_part,
    model_state,
    optimizer_part,
    required,
    shapes,
    stored_shapes,
    training_state,
    weights_of_hook,
)
from hpc_train.checkpoint.store import Checkpoint
from hpc_train.checkpoint.verified import VerifiedCheckpoint, verify_together
from hpc_train.checkpoint.writer import quiet
from hpc_train.errors import UserError
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.precision.masters import round_to_weights

LoadHook = Callable[[Mapping[str, Tensor]], str | None]  # see ``CheckpointManager.load_hook``


@dataclass(frozen=True)
class RestoredState:
    """Describes a restored checkpoint, and holds its values other than tensors.

    Attributes:
        step: number of completed optimizer steps.
        extra: the values that were passed to ``save``.
        with_optimizer: False for a fork with another optimizer, whose state starts from scratch.
        forked: whether the checkpoint belongs to the run that this one was forked from.
        drops_residuals: whether the residuals of compressed gradients are dropped, since this layout has none.
        missing: entries of the model's state dict that the checkpoint lacks, which keep their initial values.
    """

    step: int
    extra: Mapping[str, Any]
    path: Path
    with_optimizer: bool = True
    forked: bool = False
    drops_residuals: bool = False
    missing: tuple[str, ...] = ()


def restore(
    verified: VerifiedCheckpoint,
    forked: bool,
    engine: ModelState,
    optimizer: OptimizerState,
    mesh: Mesh,
    group: dist.ProcessGroup,
) -> tuple[RestoredState, LoadHook]:
    """Loads the checkpoint ``verified``; also returns how a hook loads its tensors from it.

    Args:
        forked: whether it belongs to another run, whose optimizer this run need not continue.
        group: all ranks, on the CPU.

    Raises:
        UserError: the checkpoint does not match the model or optimizer.
    """
    path = verified.checkpoint.path
    reader = SafeReader(path, verified.manifest, verified.visibility_timeout_s)
    stored = in_checkpoint = _stored_shapes(reader, group)
    expected = optimizer.expect(stored)
    state = training_state(engine, optimizer)
    required_shapes = gather_shapes(shapes(state), mesh, group) | expected
    with_optimizer = not forked or optimizer_part(stored) == optimizer_part(required_shapes)
    if not with_optimizer:
        optimizer.expect({})
        stored = model_part(stored)
        required_shapes = model_part(required_shapes)
        state = {name: tensor for name, tensor in state.items() if name in required_shapes}
    compression = CompressionLoad(engine, stored if with_optimizer else {})
    check_match(required(stored), required_shapes, where=str(path))
    extra_state = ExtraLoad(engine.parts, in_checkpoint)
    _load(state | compression.targets | extra_state.targets, reader, group)
    compression.finish()
    round_to_weights(engine.named_parameters().values())
    optimizer.loaded()
    extra_state.finish()
    restored = RestoredState(
        verified.checkpoint.step,
        verified.manifest.extra,
        path,
        with_optimizer,
        forked,
        drops_residuals=compression.drops,
        missing=tuple(lowest(extra_state.missing or None, group) or ()),
    )

    def load_hook(tensors: Mapping[str, Tensor]) -> str | None:
        problem: str | None = lowest(missing_in(in_checkpoint, shapes(tensors)), group)
        if problem is None:
            _load(tensors, reader, group)
        return problem

    return restored, load_hook


def load_weights(engine: ModelState, mesh: Mesh, checkpoint: Checkpoint, hook: str | None = None) -> Manifest:
    """Verifies ``checkpoint`` and loads its parameters and buffers into ``engine``. Collective.

    Args:
        hook: the name of a hook, such as ema; its tensors replace the parameters of the model with the same names.

    Returns:
        The manifest of the checkpoint.

    Raises:
        UserError: the checkpoint is damaged, does not match the model, or has no weights of the hook.
    """
    group = mesh.control

    def damaged(problem: object) -> UserError:
        return UserError(
            f"the checkpoint is damaged: {problem}",
            where=str(checkpoint.path),
            fix="select another one with --checkpoint; `checkpoint verify RUN` lists the intact ones",
        )

    try:
        manifest: Manifest = on_first(checkpoint.manifest, group)
    except BadCheckpoint as error:
        raise damaged(error) from error
    problem = verify_together(VerifiedCheckpoint(checkpoint, manifest), group, full=True)
    if problem is not None:
        raise damaged(problem)
    reader = SafeReader(checkpoint.path, manifest)
    state = model_state(engine)
    stored = _stored_shapes(reader, group)
    check_match(model_part(stored), gather_shapes(shapes(state), mesh, group), where=str(checkpoint.path))
    replaced = {} if hook is None else weights_of_hook(stored, hook)
    extra_state = ExtraLoad(engine.parts, stored)
    weights = {replaced.get(name, name): tensor for name, tensor in state.items()}
    _load(weights | extra_state.targets, reader, group)
    round_to_weights(engine.named_parameters().values())
    extra_state.finish()
    return manifest


def _stored_shapes(reader: SafeReader, group: dist.ProcessGroup) -> dict[str, TensorShape]:
    try:
        reader.share_metadata(group)
    except BadCheckpoint as error:
        raise UserError(
            f"refusing to load the checkpoint: {error}",
            where=str(reader.path),
            fix="load one that hpc_train saved",
        ) from None
    return stored_shapes(reader.read_metadata())


def _load(state: Mapping[str, Tensor], reader: SafeReader, group: dist.ProcessGroup) -> None:
    """Loads this rank's parts; each rank plans its own reads, since DCP would send all plans to rank 0 and back."""
    failure: Exception | None = None
    try:
        with quiet():
            if state:
                dcp.load(dict(state), storage_reader=reader, no_dist=True)
    except Exception as error:
        failure = error
    problem = lowest(None if failure is None else f"rank {dist.get_rank()}: {failure}", group)
    if problem is not None:
        raise RuntimeError(f"cannot load the checkpoint in {reader.path}: {problem}") from failure
