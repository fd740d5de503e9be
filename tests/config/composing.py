"""Composes configs in this process, as the command line would."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

from hpc_train.config.arguments import CommandLine, with_right_plus
from hpc_train.config.compose import typed
from hpc_train.config.schema import Config


def config_of(*arguments: str) -> Config:
    """The typed config of a command line."""
    return deepcopy(_composed(*arguments))


@cache
def _composed(*arguments: str) -> Config:
    line = CommandLine.parse(with_right_plus(arguments))
    with line.composer() as compose:
        return typed(compose(line.overrides))
