"""Composes configs in this process, as the command line would."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, partial
from pathlib import Path

import pytest
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from hpc_train.config import compose as with_hydra
from hpc_train.config.arguments import with_right_plus
from hpc_train.config.command_line import CommandLine, JobComposer
from hpc_train.config.compose import typed
from hpc_train.config.conf_files import PRIMARY
from hpc_train.config.schema import Config

_BY_HYDRA: dict[tuple[str, ...], bytes | Exception] = {}
_SHARED = JobComposer(with_hydra.compose)  # Hydra composes each combination of groups once for the tests of a process


def compose(overrides: Sequence[str]) -> DictConfig:
    """Composes one job from the files of the package, as a sweep does."""
    return _SHARED(overrides)


def share_compositions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the commands that a test runs in this process share what Hydra has composed, as the jobs of a sweep do."""
    composer = CommandLine.composer

    @contextmanager
    def shared(line: CommandLine) -> Iterator[JobComposer]:
        with composer(line) as compose:
            if _is_packaged(line):
                compose._composed = _SHARED._composed
                compose.compose = partial(_composed_or_refused, compose.compose)
            yield compose

    monkeypatch.setattr(CommandLine, "composer", shared)


def _composed_or_refused(compose: Callable[[list[str]], DictConfig], overrides: list[str]) -> DictConfig:
    """Returns what Hydra has composed of ``overrides``, or raises the error with which it has refused them."""
    key = tuple(overrides)
    if key not in _BY_HYDRA:
        try:
            _BY_HYDRA[key] = pickle.dumps(compose(overrides))
        except (HydraException, OmegaConfBaseException) as error:
            _BY_HYDRA[key] = error
            raise
    result = _BY_HYDRA[key]
    if isinstance(result, Exception):
        raise result.with_traceback(None)
    config: DictConfig = pickle.loads(result)
    return config


def forget_compositions() -> None:
    """Lets Hydra compose anew."""
    _SHARED._composed.clear()
    _BY_HYDRA.clear()


def _is_packaged(line: CommandLine) -> bool:
    """Returns whether only files of the package are composed."""
    return not line.directories and not line.overrides_strategy and line.config_name == PRIMARY


def config_of(*arguments: str) -> Config:
    """Returns the typed config of a command line in this directory and environment."""
    environment = frozenset(item for item in os.environ.items() if item[0] != "PYTEST_CURRENT_TEST")
    return deepcopy(_composed(Path.cwd(), environment, *arguments))


@cache
def _composed(directory: Path, environment: frozenset[tuple[str, str]], *arguments: str) -> Config:
    line = CommandLine.parse(with_right_plus(arguments))
    if _is_packaged(line):
        return typed(compose(line.overrides))
    with line.composer() as composer:
        return typed(composer(line.overrides))
