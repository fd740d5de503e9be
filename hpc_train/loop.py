"""Exports the public name for custom training loops (``run.entry``)."""

from hpc_train.train.custom_loop import Context

__all__ = ["Context"]
