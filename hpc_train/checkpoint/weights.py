"""Loads tensors of a checkpoint into the ranks of any layout, and the weights alone for an evaluation."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from hpc_train.checkpoint.agreement import lowest, on_first
from hpc_train.checkpoint.manifest import BadCheckpoint, Manifest, read_manifest
from hpc_train.checkpoint.reader import SafeReader
from hpc_train.checkpoint.state import (
    TensorShape,
    check_match,
    gather_shapes,
    model_part,
    model_state,
    shapes,
    stored_shapes,
)
from hpc_train.checkpoint.store import Checkpoint
from hpc_train.checkpoint.verified import VerifiedCheckpoint, verify_together
from hpc_train.checkpoint.writer import quiet
from hpc_train.errors import UserError
from hpc_train.parallel.engine import Engine
from hpc_train.parallel.mesh import Mesh


def load_weights(engine: Engine, mesh: Mesh, checkpoint: Checkpoint) -> Manifest:
    """Verifies ``checkpoint`` and loads its parameters and buffers into ``engine``. Collective.

    Returns:
        The manifest of the checkpoint.

    Raises:
        UserError: the checkpoint is damaged or does not match the model.
    """
    group = mesh.control
    manifest: Manifest = on_first(lambda: _read_manifest(checkpoint), group)
    problem = verify_together(VerifiedCheckpoint(checkpoint, manifest), group, full=True)
    if problem is not None:
        raise _damaged(checkpoint, problem)
    reader = SafeReader(checkpoint.path, manifest)
    state = model_state(engine)
    stored = model_part(shared_shapes(reader, group))
    check_match(stored, gather_shapes(shapes(state), mesh, group), where=str(checkpoint.path))
    read_into(state, reader, group)
    return manifest


def _read_manifest(checkpoint: Checkpoint) -> Manifest:
    try:
        return read_manifest(checkpoint.path)
    except BadCheckpoint as error:
        raise _damaged(checkpoint, str(error)) from error


def _damaged(checkpoint: Checkpoint, problem: str) -> UserError:
    return UserError(
        f"the checkpoint is damaged: {problem}",
        where=str(checkpoint.path),
        fix="select another one with --checkpoint; `checkpoint verify RUN` lists the intact ones",
    )


def shared_shapes(reader: SafeReader, group: dist.ProcessGroup) -> dict[str, TensorShape]:
    """Returns the shapes of all tensors of a checkpoint, which rank 0 reads for all ranks. Collective.

    Raises:
        UserError: hpc_train has not written the metadata.
    """
    try:
        reader.share_metadata(group)
    except BadCheckpoint as error:
        raise UserError(
            f"refusing to load the checkpoint: {error}",
            where=str(reader.path),
            fix="load one that hpc_train saved",
        ) from None
    return stored_shapes(reader.read_metadata())


def read_into(state: Mapping[str, Tensor], reader: SafeReader, group: dist.ProcessGroup) -> None:
    """Loads this rank's parts of the tensors of ``state`` in place. Collective.

    Each rank plans its own reads, since DCP would send all plans to rank 0 and back.

    Raises:
        RuntimeError: a rank cannot read its parts; raised on every rank.
    """
    failure: Exception | None = None
    try:
        with quiet():
            dcp.load(dict(state), storage_reader=reader, no_dist=True)
    except Exception as error:
        failure = error
    found = lowest(None if failure is None else f"rank {dist.get_rank(group)}: {failure}", group)
    if found is not None:
        raise RuntimeError(f"cannot load the checkpoint in {reader.path}: {found}") from failure
