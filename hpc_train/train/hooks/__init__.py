"""Provides code that runs at the events of a training: start, step, evaluation, checkpoint and end."""

from hpc_train.train.hooks.hook import Hook, HookContext

__all__ = ["Hook", "HookContext"]
