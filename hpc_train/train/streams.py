"""Keeps the ranks together at the end of a stream, and reads from checkpoints where the data continues."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hpc_train.checkpoint.manager import RestoredState
from hpc_train.data.feed import LocalBatch, TrainFeed
from hpc_train.data.sampler import Skipped
from hpc_train.data.stream import States, merged_states
from hpc_train.errors import UserError
from hpc_train.parallel.collectives import gather_plain
from hpc_train.parallel.mesh import Mesh
from hpc_train.train.changed_data import IDENTITY

_KEY = "stream"  # in the checkpoint


def has_ended(feed: TrainFeed, batch: LocalBatch, step: int, mesh: Mesh) -> bool:
    """Returns whether ``batch``, that of step ``step`` (from 0), is empty on all ranks, so that all stop before it.

    Collective where the data may end; always False for other data.

    Raises:
        UserError: the stream has no items at all.
    """
    if not feed.may_end:
        return False
    going_on = torch.tensor(int(not batch.ended))
    dist.all_reduce(going_on, group=mesh.control)
    if going_on.item() == 0 and step == 0:
        raise UserError(
            "the stream has no items", where="data._target_", fix="yield items with split='train' in some shard"
        )
    return going_on.item() == 0


def positions(feed: TrainFeed, step: int, mesh: Mesh) -> dict[str, Any]:
    """Returns what a checkpoint of ``step`` holds: the positions of all shards of a stream, or which data it is.
    Collective.
    """
    own = feed.state(step)
    return {IDENTITY: feed.identity} if own is None else {_KEY: merged_states(gather_plain(own, mesh.control))}


def restored_positions(restored: RestoredState) -> States:
    """Returns where a checkpoint says that the shards of a stream continue."""
    states: States = restored.extra.get(_KEY, {})
    return states


def skipped_data(restored: RestoredState) -> Skipped:
    """Returns the data that a checkpoint says to skip."""
    return Skipped.parse(restored.extra.get("skipped_windows", ()))
