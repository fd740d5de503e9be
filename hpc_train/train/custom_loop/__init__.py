"""Runs a custom loop in the workers (``run.entry=package.module:function``): the function gets a ``Context``."""

from hpc_train.train.custom_loop.context import Context

__all__ = ["Context"]
