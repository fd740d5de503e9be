"""Creates checkpoints without a run, in the format of a save."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hpc_train.checkpoint.store import Checkpoint
from hpc_train.checkpoint.transfer import write_checkpoint
from hpc_train.run.directory import RunDirectory


def commit(run: RunDirectory, step: int, state: Mapping[str, Tensor]) -> Checkpoint:
    """Commits ``state`` as the checkpoint of ``step``."""
    return write_checkpoint(run, step, state)
