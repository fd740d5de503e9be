"""Loads a verified checkpoint of any layout into the model and optimizer of the current layout. Collective.

An evaluation loads only the weights.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hpc_train.checkpoint.agreement import Group, lowest, on_first, rank_in, size_of
from hpc_train.checkpoint.extra_state import ExtraLoad
from hpc_train.checkpoint.manifest import BadCheckpoint, Manifest
from hpc_train.checkpoint.reader import SafeReader
from hpc_train.checkpoint.state import (
    PREFIX,
    CompressionLoad,
    ModelState,
    OptimizerState,
    OuterState,
    Ranks,
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
from hpc_train.parallel.collectives import broadcast_tensors
from hpc_train.parallel.mesh import all_gather_tensor
from hpc_train.parallel.precision.masters import local_part, round_to_weights

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
        rounded: frozen parameters that the checkpoint has in fp32, and the run in bf16 or fp16.
    """

    step: int
    extra: Mapping[str, Any]
    path: Path
    with_optimizer: bool = True
    forked: bool = False
    drops_residuals: bool = False
    missing: tuple[str, ...] = ()
    rounded: tuple[str, ...] = ()


@dataclass(frozen=True)
class OpenCheckpoint:
    """Holds a verified checkpoint whose metadata all ranks have read.

    Attributes:
        forked: whether it belongs to another run, whose optimizer this run need not continue.
        stored: name -> shape of all tensors in it.
    """

    checkpoint: Checkpoint
    manifest: Manifest
    reader: SafeReader
    stored: Mapping[str, TensorShape]
    forked: bool = False

    @property
    def parameters(self) -> frozenset[str]:
        """Returns the canonical names of the parameters and buffers in it."""
        return frozenset(name.removeprefix("model.") for name in model_part(self.stored))


def open_checkpoint(verified: VerifiedCheckpoint, group: Group, forked: bool = False) -> OpenCheckpoint:
    """Reads the metadata of a checkpoint on the first rank and sends it to the others. Collective.

    Raises:
        UserError: the metadata is not of the kind that hpc_train writes.
    """
    path = verified.checkpoint.path
    reader = SafeReader(path, verified.manifest, verified.visibility_timeout_s)
    try:
        reader.share_metadata(group)
    except BadCheckpoint as error:
        raise UserError(
            f"refusing to load the checkpoint: {error}",
            where=str(path),
            fix="load one that hpc_train saved",
        ) from None
    stored = stored_shapes(reader.read_metadata())
    return OpenCheckpoint(verified.checkpoint, verified.manifest, reader, stored, forked)


def restore(
    source: OpenCheckpoint,
    engine: ModelState,
    optimizer: OptimizerState,
    mesh: Ranks,
    group: Group,
    outer: OuterState | None = None,
) -> tuple[RestoredState, LoadHook]:
    """Loads the checkpoint ``source``; also returns how a hook loads its tensors from it.

    Args:
        group: all ranks, on the CPU.

    Raises:
        UserError: the checkpoint does not match the model or optimizer.
    """
    path = source.checkpoint.path
    stored = source.stored
    expected = optimizer.expect(stored)
    state = training_state(engine, optimizer)
    required_shapes = gather_shapes(shapes(state), mesh, group) | expected
    with_optimizer = not source.forked or optimizer_part(stored) == optimizer_part(required_shapes)
    if not with_optimizer:
        optimizer.expect({})
        stored = model_part(stored)
        required_shapes = model_part(required_shapes)
        state = {name: tensor for name, tensor in state.items() if name in required_shapes}
    compression = CompressionLoad(engine, stored if with_optimizer else {})
    check_match(required(stored), required_shapes, where=str(path))
    extra_state = ExtraLoad(engine.parts, source.stored)
    targets = state if outer is None else outer.targets(state, stored)
    load_tensors(targets | compression.targets | extra_state.targets, source.reader, mesh, group)
    if outer is not None:
        outer.loaded(stored)
    compression.finish()
    round_to_weights(engine.named_parameters().values())
    optimizer.loaded()
    extra_state.finish()
    restored = RestoredState(
        source.checkpoint.step,
        source.manifest.extra,
        path,
        with_optimizer,
        source.forked,
        drops_residuals=compression.drops,
        missing=tuple(lowest(extra_state.missing or None, group) or ()),
        rounded=tuple(
            name.removeprefix("model.")
            for name, shape in model_part(required_shapes).items()
            if shape.dtype.itemsize < stored[name].dtype.itemsize
        ),
    )

    def load_hook(tensors: Mapping[str, Tensor]) -> str | None:
        problem: str | None = lowest(missing_in(source.stored, shapes(tensors)), group)
        if problem is None:
            load_tensors(tensors, source.reader, mesh, group)
        return problem

    return restored, load_hook


def open_weights(checkpoint: Checkpoint, mesh: Ranks) -> OpenCheckpoint:
    """Verifies ``checkpoint`` and reads its metadata, before ``load_weights``. Collective.

    Raises:
        UserError: the checkpoint is damaged.
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
    verified = VerifiedCheckpoint(checkpoint, manifest)
    problem = verify_together(verified, group, full=True)
    if problem is not None:
        raise damaged(problem)
    return open_checkpoint(verified, group)


def load_weights(source: OpenCheckpoint, engine: ModelState, mesh: Ranks, hook: str | None = None) -> None:
    """Loads the parameters and buffers of ``source`` into ``engine``. Collective.

    Args:
        hook: the name of a hook, such as ema; its tensors replace the parameters of the model with the same names.

    Raises:
        UserError: the checkpoint does not match the model, or has no weights of the hook.
    """
    group = mesh.control
    state = model_state(engine)
    needed = gather_shapes(shapes(state), mesh, group)
    check_match(model_part(source.stored), needed, where=str(source.checkpoint.path))
    replaced = {} if hook is None else weights_of_hook(source.stored, hook)
    extra_state = ExtraLoad(engine.parts, source.stored)
    weights = {replaced.get(name, name): tensor for name, tensor in state.items()}
    load_tensors(weights | extra_state.targets, source.reader, mesh, group)
    round_to_weights(engine.named_parameters().values())
    extra_state.finish()


def load_tensors(state: Mapping[str, Tensor], reader: SafeReader, mesh: Ranks, group: Group) -> None:
    """Loads this rank's parts. Replicas read each part once, and each of them reads an equal share of the bytes.

    Each rank plans its own reads, since DCP would send all plans to rank 0 and back.
    """
    replicas = _replicas(state, mesh, group)
    shares: list[list[str]] = []
    reads = dict(state)
    if replicas is not None:
        shares = _equal_shares({name: local_part(state[name]).nbytes for name in _shared(state)}, replicas.size())
        for rank, share in enumerate(shares):
            if rank != replicas.rank():
                for name in share:
                    del reads[name]
    failure: Exception | None = None
    try:
        with quiet():
            if reads:
                dcp.load(reads, storage_reader=reader, no_dist=True)
    except Exception as error:
        failure = error
    problem = lowest(None if failure is None else f"rank {rank_in(group)}: {failure}", group)
    if problem is not None:
        raise RuntimeError(f"cannot load the checkpoint in {reader.path}: {problem}") from failure
    for rank, share in enumerate(shares):
        assert replicas is not None
        broadcast_tensors([local_part(state[name].detach()) for name in share], rank, replicas, mesh.device)


def _shared(state: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of the tensors that replicas share; the state of compression differs between them."""
    return [name for name in state if not name.startswith(PREFIX)]


def _replicas(state: Mapping[str, Tensor], mesh: Ranks, group: Group) -> dist.ProcessGroup | None:
    """Returns the largest group of this rank whose ranks hold the same parts of the same tensors. Collective."""
    if group is None:
        return None
    parts = []
    for name in _shared(state):
        tensor = state[name]
        offset: tuple[int, ...] = ()
        if isinstance(tensor, DTensor):
            _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        parts.append((name, tuple(local_part(tensor).shape), tuple(offset), str(tensor.dtype)))
    digest = torch.tensor(xxhash.xxh3_64(repr(parts).encode()).intdigest() >> 1)
    digests = torch.empty(size_of(group), dtype=torch.int64)
    all_gather_tensor(digests, digest.view(1), group=group)
    for axis in ("dp_cp", "dp_replicate"):
        replicas = mesh.group(axis)
        assert replicas is not None, "there are several ranks"
        ranks = dist.get_process_group_ranks(replicas)
        if len(ranks) > 1 and len({*digests[ranks].tolist()}) == 1:
            return replicas
    return None


def _equal_shares(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Divides names into ``count`` shares of nearly equal size in bytes."""
    shares: list[list[str]] = [[] for _ in range(count)]
    heap = [(0, rank) for rank in range(count)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        size, rank = heapq.heappop(heap)
        shares[rank].append(name)
        heapq.heappush(heap, (size + sizes[name], rank))
    return shares
