"""Composes the jobs of a sweep and converts them to typed configs, at a cost that suits a thousand of them.

Hydra takes about 70 ms to compose a job, and the conversion 15 ms. ``JobComposer`` lets Hydra compose each combination
of groups once and merges the values of the other overrides into a copy. ``JobConfigs`` converts one job of each kind as
a whole, where the jobs of a kind differ only in the values of the same keys; for the others it converts and checks only
the values that differ. Whatever these short ways do not cover, or refuse, takes the long way, whose messages are exact.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from functools import lru_cache
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpc_train.config.compose import (
    check_kinds,
    completed,
    group_schema,
    plain,
    to_config,
    typed,
)
from hpc_train.config.extensions import load_source
from hpc_train.config.schema import Config
from hpc_train.config.secrets import contains_secret, leaves
from hpc_train.config.values import absolute, for_debugging
from hpc_train.errors import UserError

Compose = Callable[[Sequence[str]], DictConfig]


@dataclass
class JobComposer:
    """Composes jobs from their overrides.

    Attributes:
        compose: composes one job with Hydra.
    """

    compose: Callable[[list[str]], DictConfig]
    # pickled, because a deep copy takes five times as long
    _composed: dict[tuple[str, ...], bytes] = field(default_factory=dict)

    def __call__(self, overrides: Sequence[str]) -> DictConfig:
        """Returns the composed config of one job.

        Raises:
            hydra.errors.HydraException, OmegaConfBaseException: an unknown group, option or key, or a wrong type.
        """
        parsed = [parsed_override(text) for text in overrides]
        choices = [override for override in parsed if is_choice(override)]
        values = [override for override in parsed if not is_choice(override)]
        if not all(_is_plain(override) for override in values):
            return self.compose(list(overrides))
        key = tuple(override.input_line or "" for override in choices)
        if key not in self._composed:
            self._composed[key] = pickle.dumps(self.compose(list(key)))
        config: DictConfig = pickle.loads(self._composed[key])
        try:
            for override in values:
                OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
        except OmegaConfBaseException:
            return self.compose(list(overrides))  # raises Hydra's own error
        return config


@lru_cache(maxsize=4096)
def parsed_override(text: str) -> Override:
    """Parses one override; cached, because the jobs of a sweep share most of theirs."""
    (parsed,) = OverridesParser.create().parse_overrides([text])
    return parsed


def is_choice(override: Override) -> bool:
    """Returns whether only Hydra can apply the override: ``group=option`` or one of Hydra's own settings."""
    key = override.key_or_group
    return key.startswith("hydra.") or ("." not in key and not isinstance(override.value(), dict))


def _is_plain(override: Override) -> bool:
    """Returns whether the override is ``key=value`` for a key below a group. The order of other overrides matters."""
    changes = not (override.is_add() or override.is_force_add() or override.is_delete())
    return changes and "." in override.key_or_group


Leaves = dict[str, Any]  # values by their dotted keys


class _Differs(Exception):
    """Reports that a job differs from the first of its kind in more than the values of keys."""


class JobConfigs:
    """Converts the jobs of a sweep, from their overrides, to the configs that ``typed`` makes of them.

    Args:
        compose: composes one job.
    """

    def __init__(self, compose: Compose) -> None:
        self._compose = compose
        self._first: dict[tuple[str, ...], Sequence[str]] = {}  # the overrides of the first valid job of each kind
        self._kinds: dict[tuple[str, ...], _Kind] = {}

    def __call__(self, overrides: Sequence[str]) -> Config:
        """Returns the config of one job.

        Raises:
            UserError: a value is missing or wrong.
            hydra.errors.HydraException, OmegaConfBaseException: an unknown group, option or key, or a wrong type.
        """
        fixed, values = _separated(overrides)
        kind = (*fixed, "", *values)
        if kind in self._first:
            with suppress(_Differs, UserError, OmegaConfBaseException):
                return self._kind(kind).config(values)
        config = typed(self._compose(overrides))
        self._first.setdefault(kind, overrides)
        return config

    def _kind(self, kind: tuple[str, ...]) -> _Kind:
        if kind not in self._kinds:
            first = self._first[kind]
            self._kinds[kind] = _Kind(self._compose(first), _separated(first)[1])
        return self._kinds[kind]


def _separated(overrides: Sequence[str]) -> tuple[list[str], Leaves]:
    """Returns the overrides that all jobs of a kind share, and the values of the keys in which they may differ."""
    fixed, values = [], {}
    for text in overrides:
        override = parsed_override(text)
        if _is_plain(override) and not is_choice(override) and _is_leaf(override.key_or_group, override.value()):
            values[override.key_or_group] = override.value()
        else:
            fixed.append(text)
    return fixed, values


def _is_leaf(key: str, value: Any) -> bool:
    """Returns whether the value can only be a leaf, which decides nothing about other keys."""
    if key.rpartition(".")[2] in ("kind", "_target_") or "[" in key:
        return False
    return value is None or isinstance(value, bool | int | float) or (isinstance(value, str) and _is_final(value))


def _is_final(value: str) -> bool:
    return "${" not in value and value != "???"


class _Kind:
    """Converts the jobs that differ from ``composed`` only in the values of the same keys.

    Args:
        composed: the composed config of the first of them.
        values: those of the first.
    """

    def __init__(self, composed: DictConfig, values: Leaves) -> None:
        self._first, self._current = values, dict(values)
        self._node: DictConfig = pickle.loads(pickle.dumps(completed(composed)))
        texts = {key: text for key, text in leaves(OmegaConf.to_container(self._node, resolve=False)) if "${" in text}
        self._interpolations = list(texts)
        self._mentions = {name for text in texts.values() for name in _mentioned(text)}
        resolved = plain(self._node)
        self._kinds = str(resolved["model"]["kind"]), str(resolved["data"]["kind"])
        groups = {key.partition(".")[0] for key in (*values, *texts)}
        self._schemas = {name: group_schema(name, *self._kinds, resolved[name]) for name in groups}
        self._config = pickle.dumps(to_config(resolved))

    def config(self, values: Leaves) -> Config:
        """Returns the config with ``values``.

        Raises:
            _Differs, UserError, OmegaConfBaseException: it must be converted as a whole.
        """
        changed = {key: value for key, value in values.items() if not _same(value, self._first[key])}
        config: Config = pickle.loads(self._config)
        for key, value in self._resolved(values, changed).items():
            if OmegaConf.is_config(value) or (isinstance(value, str) and not _is_final(value)):
                raise _Differs
            if isinstance(value, str) and contains_secret(value):
                raise _Differs
            schema = self._schemas[key.partition(".")[0]]
            OmegaConf.update(schema, key, value, force_add=False)
            _set(config, key, OmegaConf.select(schema, key, throw_on_missing=True))
        return for_debugging(absolute(config))

    def _resolved(self, values: Leaves, changed: Leaves) -> Leaves:
        """Returns the changed values as the composed config holds them, and the values that refer to one of them."""
        for key, value in values.items():
            if _same(value, self._current[key]):
                continue
            if OmegaConf.is_config(OmegaConf.select(self._node, key)):
                raise _Differs
            OmegaConf.update(self._node, key, value, merge=True)
            self._current[key] = value
        groups = {key.partition(".")[0] for key in changed}
        if "data" in groups and (self._kinds[1] == "mixture" or load_source(self._kinds[1]).vocabulary is not None):
            raise _Differs  # sizes of the data follow from its values
        if groups & {"model", "data"}:
            check_kinds(self._node)
        follow = self._interpolations if any(map(self._is_mentioned, changed)) else []
        return {key: OmegaConf.select(self._node, key) for key in [*changed, *follow]}

    def _is_mentioned(self, key: str) -> bool:
        return any(
            name in ("", key) or key.startswith(f"{name}.") or name.startswith(f"{key}.") for name in self._mentions
        )


def _mentioned(text: str) -> list[str]:
    """Returns the keys to which an interpolation may refer; "" for any key, also if it calls an unknown resolver."""
    resolvers = re.findall(r"\$\{\s*([\w.]+)\s*:", text)
    unknown = any(not name.startswith(("hpc_train.", "oc.env")) for name in resolvers)
    if unknown or "${." in text or "[" in text or not re.fullmatch(r"[\w.${}:,/ -]*", text):
        return [""]
    return re.findall(r"[\w-]+(?:\.[\w-]+)*", text)


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and repr(value) == repr(other)  # 0.0 and -0.0 differ, nan does not


def _set(config: Config, key: str, value: Any) -> None:
    """Sets the leaf ``key``, whose parents are dataclasses or dicts."""
    *parents, name = key.split(".")
    owner: Any = config
    for parent in parents:
        owner = getattr(owner, parent) if is_dataclass(owner) else owner[parent]
    if is_dataclass(owner) and hasattr(owner, name):
        setattr(owner, name, value)
    elif isinstance(owner, dict) and name in owner:
        owner[name] = value
    else:
        raise _Differs
