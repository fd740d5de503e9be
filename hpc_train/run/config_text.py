"""Writes a config as the YAML of ``config.yaml``."""

from __future__ import annotations

import pickle
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import yaml

from hpc_train.config.schema import Config


def text_of(config: Config) -> str:
    """Returns the frozen form: plain YAML without interpolations. Equal configs give equal text."""
    return "".join(_yaml(pickle.dumps({name: values})) for name, values in asdict(config).items())


@lru_cache(maxsize=256)
def _yaml(group: bytes) -> str:
    """Returns a pickled group as YAML. Most runs of a sweep share most groups, and most keys of the other groups."""
    ((name, values),) = pickle.loads(group).items()
    if not isinstance(values, dict) or not values:
        return _dumped({name: values})
    return f"{name}:\n" + "".join(_yaml_of_key(pickle.dumps(item)) for item in values.items())


@lru_cache(maxsize=4096)
def _yaml_of_key(item: bytes) -> str:
    key, value = pickle.loads(item)
    return _dumped({"group": {key: value}}).partition("\n")[2]


def _dumped(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=120)
