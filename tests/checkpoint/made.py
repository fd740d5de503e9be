"""Creates checkpoints without a run, in the format of a save."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from hpc_train.checkpoint.manifest import BadCheckpoint, verify
from hpc_train.checkpoint.store import Checkpoint
from hpc_train.checkpoint.transfer import write_checkpoint
from hpc_train.run.directory import RunDirectory


def commit(run: RunDirectory, step: int, state: Mapping[str, Tensor]) -> Checkpoint:
    """Commits ``state`` as the checkpoint of ``step``."""
    return write_checkpoint(run, step, state)


def is_complete(checkpoint: Checkpoint) -> bool:
    """Returns whether all files exist in their full size; does not read their content."""
    try:
        verify(checkpoint.path, checkpoint.manifest(), full=False)
    except (BadCheckpoint, OSError):
        return False
    return True


def quiet_bar(what: str, total: int) -> nullcontext[Any]:
    """Stands for the progress bar of an export or import."""
    return nullcontext(lambda count: None)
