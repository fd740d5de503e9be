"""Composes configs in this process, as the command line would."""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path

from omegaconf import DictConfig

from hpc_train.config import compose as with_hydra
from hpc_train.config.arguments import with_right_plus
from hpc_train.config.command_line import CommandLine, JobComposer
from hpc_train.config.compose import PRIMARY, typed
from hpc_train.config.schema import Config

_SHARED = JobComposer(with_hydra.compose)  # Hydra composes each combination of groups once for the tests of a process


def compose(overrides: Sequence[str]) -> DictConfig:
    """Composes one job from the files of the package, as a sweep does."""
    return _SHARED(overrides)


def config_of(*arguments: str) -> Config:
    """Returns the typed config of a command line in this directory and environment."""
    return deepcopy(_composed(Path.cwd(), frozenset(os.environ.items()), *arguments))


@cache
def _composed(directory: Path, environment: frozenset[tuple[str, str]], *arguments: str) -> Config:
    line = CommandLine.parse(with_right_plus(arguments))
    if not line.directories and not line.overrides_strategy and line.config_name == PRIMARY:
        return typed(compose(line.overrides))
    with line.composer() as composer:
        return typed(composer(line.overrides))
