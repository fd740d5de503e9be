"""Finds out whether the training data has changed since a checkpoint was saved, which changes the order of samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpc_train.checkpoint.restoring import RestoredState
from hpc_train.data.feed import TrainFeed
from hpc_train.errors import UserError

IDENTITY = "data"  # in the checkpoint: ``Dataset.identity``


def data_changes(restored: RestoredState, feed: TrainFeed) -> list[str]:
    """Returns warnings about training data without a fingerprint, that of a user, that has changed since the checkpoint
    was saved. A fork may have any data, and checkpoints of earlier versions do not say which they had.

    Raises:
        UserError: data with a fingerprint has changed.
    """
    saved, now = {} if restored.forked else restored.extra.get(IDENTITY, {}), feed.identity
    pairs = [("", saved, now)] if "sources" not in now else []
    for name, source in saved.get("sources", {}).items():
        pairs.append((f" of the source {name}", source, now["sources"][name]))
    found = [_change(which, before, after, restored.step) for which, before, after in pairs if before]
    return [message for message in found if message is not None]


def _change(which: str, before: Mapping[str, Any], after: Mapping[str, Any], step: int) -> str | None:
    known = bool(before["fingerprint"] and after["fingerprint"])
    if before["samples"] != after["samples"]:
        problem = f"has {after['samples']:,} samples, but had {before['samples']:,} in the checkpoint of step {step}"
    elif known and before != after:
        problem = f"is not that of the checkpoint of step {step}, although it also has {after['samples']:,} samples"
    else:
        return None
    message = (
        f"the training data{which} {problem}; in the changed order some samples of the epoch repeat, others are missed"
    )
    if not known:
        return message
    raise UserError(
        message,
        where="data",
        fix="restore the data, or run.fork=NEWNAME to start a new run from the newest checkpoint with this data",
    )
