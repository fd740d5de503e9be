"""Hydra-composed, submitit-launched, fault-tolerant PyTorch training on Slurm clusters.

``submit``, ``Run``, ``find_runs`` and ``UserError`` are the public API (see ``hpc_train.api``). They are imported when
they are first used, so ``import hpc_train`` is cheap.
"""

from typing import TYPE_CHECKING, Any

from hpc_train.version import __version__

if TYPE_CHECKING:
    from hpc_train.api import CheckpointInfo, Run, Status, UserError, find_runs, submit

__all__ = ["__version__", "CheckpointInfo", "Run", "Status", "UserError", "find_runs", "submit"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hpc_train import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
