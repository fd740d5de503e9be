"""Checkpoints: of runs, and of any other training loop with ``save``, ``load`` and ``Checkpoints``.

These names are imported when they are first used: they import torch, which listing checkpoints does not need.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_train.checkpoint.standalone import Checkpoints, SaveFailed, load, save

__all__ = ["Checkpoints", "SaveFailed", "load", "save"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hpc_train.checkpoint import standalone

    return getattr(standalone, name)
