"""The public name for training loops of the user."""

from hpc_train.train.custom_loop import Context

__all__ = ["Context"]
