"""Hydra-composed, submitit-launched, fault-tolerant PyTorch training on Slurm clusters.

``submit``, ``Run``, ``find_runs`` and ``UserError`` are the public API (see ``hpc_train.api``). They are imported when
they are first used, so ``import hpc_train`` is cheap. ``heartbeat`` is for programs that ``exec`` runs.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_train.version import __version__

if TYPE_CHECKING:
    from hpc_train.api import CheckpointInfo, Run, Status, UserError, find_runs, submit

__all__ = ["__version__", "CheckpointInfo", "Run", "Status", "UserError", "find_runs", "heartbeat", "submit"]


def heartbeat(step: int | None = None) -> None:
    """Shows the agent that this process of ``exec`` or ``run.command`` makes progress. Elsewhere it does nothing.

    Args:
        step: the number of completed steps, which ``status`` shows; None shows none.
    """
    path = os.environ.get("HPC_TRAIN_PROGRESS")
    if path is not None:
        with suppress(OSError):
            Path(path).write_text("" if step is None else str(step))


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hpc_train import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
