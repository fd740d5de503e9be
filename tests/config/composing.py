"""Composes configs in this process, as the command line would."""

from __future__ import annotations

import os
from copy import deepcopy
from functools import cache
from pathlib import Path

from hpc_train.config.arguments import CommandLine, with_right_plus
from hpc_train.config.compose import typed
from hpc_train.config.schema import Config


def config_of(*arguments: str) -> Config:
    """Returns the typed config of a command line in this directory and environment."""
    return deepcopy(_composed(Path.cwd(), frozenset(os.environ.items()), *arguments))


@cache
def _composed(directory: Path, environment: frozenset[tuple[str, str]], *arguments: str) -> Config:
    line = CommandLine.parse(with_right_plus(arguments))
    with line.composer() as compose:
        return typed(compose(line.overrides))
