"""Tracks the progress of a run in its data: the length of the run, the end of a stream, and the records of both in
checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hpc_train.checkpoint.restoring import RestoredState
from hpc_train.config.schema import Config
from hpc_train.data.feed import LocalBatch, TrainFeed
from hpc_train.data.sampler import Skipped
from hpc_train.data.stream import States, merged_states
from hpc_train.errors import UserError
from hpc_train.parallel.collectives import gather_plain
from hpc_train.parallel.mesh import Mesh


@dataclass(frozen=True)
class Length:
    """Holds the length of a run and of its epochs.

    Attributes:
        samples_per_epoch: the number of samples that an epoch uses, without the samples that ``batch.drop_last`` drops.
    """

    total_steps: int
    steps_per_epoch: int
    global_size: int
    samples_per_epoch: int

    def samples(self, steps: int) -> int:
        """Returns the number of samples in the first ``steps`` steps, without padding."""
        epochs, rest = divmod(steps, self.steps_per_epoch)
        return epochs * self.samples_per_epoch + min(self.samples_per_epoch, rest * self.global_size)


def run_length(config: Config, feed: TrainFeed) -> Length:
    """Returns the length of the run of ``config``. A stream is one epoch."""
    size = config.batch.global_size
    steps = config.train.steps
    if feed.steps_per_epoch is None or feed.samples_per_epoch is None:
        assert steps is not None
        return Length(steps, max(1, steps), size, max(1, steps) * size)
    if steps is None:
        steps = math.ceil((config.train.epochs or 0.0) * feed.steps_per_epoch)
    return Length(steps, feed.steps_per_epoch, size, feed.samples_per_epoch)


IDENTITY = "data"  # the key of ``Dataset.identity`` in a checkpoint
_KEY = "stream"  # the key of the positions of a stream in a checkpoint


def has_ended(feed: TrainFeed, batch: LocalBatch, step: int, mesh: Mesh) -> bool:
    """Returns whether ``batch``, the batch of step ``step`` (from 0), is empty on all ranks, so that the run ends
    before it.

    Collective if the data may end; always False for other data.

    Raises:
        UserError: the stream has no items at all.
    """
    if not feed.may_end:
        return False
    going_on = torch.tensor(int(not batch.ended))
    dist.all_reduce(going_on, group=mesh.control)
    if going_on.item() > 0:
        return False
    if step == 0:
        raise UserError(
            "the stream has no items", where="data._target_", fix="yield items with split='train' in some shard"
        )
    return True


def positions(feed: TrainFeed, step: int, mesh: Mesh) -> dict[str, Any]:
    """Returns the record of the data in a checkpoint of ``step``: the positions of all shards of a stream, or the
    identity of other data. Collective.
    """
    state = feed.state(step)
    if state is None:
        return {IDENTITY: feed.identity}
    return {_KEY: merged_states(gather_plain(state, mesh.control))}


def restored_positions(restored: RestoredState) -> States:
    """Returns the positions in a checkpoint at which the shards of a stream continue."""
    states: States = restored.extra.get(_KEY, {})
    return states


def skipped_data(restored: RestoredState) -> Skipped:
    """Returns the data to skip according to a checkpoint."""
    return Skipped.parse(restored.extra.get("skipped_windows", ()))


def data_changes(restored: RestoredState, feed: TrainFeed) -> list[str]:
    """Returns warnings if custom training data without a fingerprint has changed since the checkpoint was saved. A fork
    may have any data, and checkpoints of earlier versions do not record their data.

    Raises:
        UserError: data with a fingerprint has changed.
    """
    if restored.forked:
        return []
    saved = restored.extra.get(IDENTITY, {})
    now = feed.identity
    pairs = []
    if "sources" not in now:
        pairs.append(("", saved, now))
    for name, source in saved.get("sources", {}).items():
        pairs.append((f" of the source {name}", source, now["sources"][name]))
    warnings = []
    for which, before, after in pairs:
        if not before:
            continue
        samples = f"{after['samples']:,} samples"
        has_fingerprint = bool(before["fingerprint"] and after["fingerprint"])
        if before["samples"] != after["samples"]:
            problem = f"has {samples}, but had {before['samples']:,} in the checkpoint of step {restored.step}"
        elif has_fingerprint and before != after:
            problem = f"differs from the data of the checkpoint of step {restored.step}, although it also has {samples}"
        else:
            continue
        message = (
            f"the training data{which} {problem}; in the changed order, some samples of the epoch are repeated and "
            "others are missed"
        )
        if has_fingerprint:
            fix = "restore the data, or run.fork=NEWNAME to start a new run from the newest checkpoint with this data"
            raise UserError(message, where="data", fix=fix)
        warnings.append(message)
    return warnings
