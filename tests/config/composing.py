"""Composes configs in this process, as the command line would."""

from __future__ import annotations

from hpc_train.config.arguments import CommandLine, with_right_plus
from hpc_train.config.compose import typed
from hpc_train.config.schema import Config


def config_of(*arguments: str) -> Config:
    """The typed config of a command line."""
    line = CommandLine.parse(with_right_plus(arguments))
    with line.composer() as compose:
        return typed(compose(line.overrides))
