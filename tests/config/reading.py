"""Lets Hydra read each of its own files and of those in ``conf/`` once per process.

For one composition Hydra parses 25 files and copies its ConfigStore, and the tests compose hundreds of times. Without
both a composition takes less than half the time. Files of users are read each time.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import copy
from typing import Any

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.plugins.config_source import ConfigResult, ConfigSource

from hpc_train.config.compose import config_directory

Load = Callable[[Any, str], ConfigResult]


def read_once() -> None:
    """Replaces the methods with which Hydra reads files and copies its ConfigStore; for the rest of this process."""
    for source in (FileConfigSource, ImportlibResourcesConfigSource):
        setattr(source, "load_config", _once(source.load_config))  # noqa: B010
    setattr(ConfigStore, "load", _load)  # noqa: B010
    setattr(ConfigStore, "__deepcopy__", lambda store, memo: store)  # noqa: B010 - its readers copy each node


def _once(load: Load) -> Load:
    unchanging = (str(config_directory()), "hydra.conf")
    results: dict[tuple[str, str, str], bytes] = {}

    def load_once(source: ConfigSource, config_path: str) -> ConfigResult:
        if source.path not in unchanging:
            return load(source, config_path)
        key = source.provider, source.path, config_path
        if key not in results:
            results[key] = pickle.dumps(load(source, config_path))
        result: ConfigResult = pickle.loads(results[key])
        return result

    return load_once


def _load(store: ConfigStore, config_path: str) -> ConfigNode:
    stored = store._load(config_path)
    if stored.group == "hydra/sweeper":  # hpc_train changes those of Optuna and Nevergrad
        return _load_copy(store, config_path)
    if id(stored) not in _STORED:
        _STORED[id(stored)] = stored, pickle.dumps(stored.node)
    node = copy(stored)
    node.node = pickle.loads(_STORED[id(stored)][1])  # a deep copy takes five times as long
    return node


_load_copy = ConfigStore.load
_STORED: dict[int, tuple[ConfigNode, bytes]] = {}  # by the identity of the node, which must stay alive
