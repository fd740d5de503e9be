"""Exports the public names for hooks."""

from hpc_train.train.hooks import Hook, HookContext

__all__ = ["Hook", "HookContext"]
