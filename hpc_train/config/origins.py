"""Names the file, or the command line, that sets each key of a composed config: ``--cfg job --origins``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from hpc_train.config.command_line import CommandLine, is_choice, is_search_path, parsed_override
from hpc_train.config.compose import WITH_STRATEGY, plain
from hpc_train.config.conf_files import PRIMARY, config_directory
from hpc_train.config.own_files import leaves, place_of, read_yaml
from hpc_train.config.removed import RENAMED
from hpc_train.config.secrets import shown
from hpc_train.config.settings import read_settings
from hpc_train.errors import UserError

DEFAULT = "default"
ROOT_OF_SETTINGS = "${hpc_train.root:}"  # in conf/run/default.yaml
COMMAND_LINE = "the command line"


@dataclass(frozen=True)
class Origin:
    """Holds the value of a key, which may have interpolations, and the place that sets it, such as a file and line."""

    key: str
    value: Any
    place: str

    def __str__(self) -> str:
        listed = yaml.safe_dump(
            [shown(self.key, self.value)], default_flow_style=True, width=10_000, allow_unicode=True
        )
        return f"{self.key}: {listed.strip()[1:-1]}  # {self.place}"


def origins(line: CommandLine) -> list[Origin]:
    """Returns the keys of the job that ``line`` describes, with ``-p`` only those below it, in the order of ``--cfg
    job``. Raises UserError if there is no key below ``-p``, and hydra.errors.HydraException or OmegaConfBaseException
    for an unknown group, option or key, or a wrong type."""
    with line.composer() as compose:
        node = compose(list(line.overrides))
        places = dict(_places(line))
    keys = [(key, value) for key, value in _leaves(node) if line.package is None or is_below(key, (line.package,))]
    if not keys:
        what = f"{line.package} is not a config key or a group"
        raise UserError(what, where="--package", fix="-p cluster, for example, or omit it to show all keys")
    return [Origin(key, value, places.get(key, DEFAULT)) for key, value in keys]


def defaults(line: CommandLine) -> dict[str, Any]:
    """Returns the keys that neither the command line nor a file of the user or the site sets, with their values, which
    may have interpolations. ``line`` describes one job. Raises as ``origins``.
    """
    with _without_hydra_of_caller(), line.composer() as compose:
        values = dict(_leaves(compose(list(line.overrides))))
        files = [(key, file) for key, file, _ in _keys_of_files(line)]
    given = {key for key, file in files if not file.is_relative_to(config_directory())}
    given |= {override.key_or_group for override in map(parsed_override, line.overrides) if not is_choice(override)}
    return {key: value for key, value in values.items() if not is_below(key, given)}


def keys_of_own_files(line: CommandLine, overrides: Sequence[str]) -> Sequence[tuple[str, Path, Any]]:
    """Returns the keys that the user's files outside of ``conf/`` set in the job of ``line`` with ``overrides``, with
    the files and the nodes of their values, the weakest file first."""
    if not line.directories and line.config_name == PRIMARY:
        return ()
    choices = (text for text in overrides if is_choice(parsed_override(text)) and not is_search_path(text))
    search_path = (text for text in line.overrides if is_search_path(text))
    return _keys_of_own_files(replace(line, overrides=(*search_path, *choices)))


@lru_cache(maxsize=256)
def _keys_of_own_files(line: CommandLine) -> tuple[tuple[str, Path, Any], ...]:
    with _without_hydra_of_caller(), line.initialized():
        return tuple(row for row in _keys_of_group_files(line) if not row[1].is_relative_to(config_directory()))


@contextmanager
def _without_hydra_of_caller() -> Iterator[None]:
    """Lets the ``with`` block initialize Hydra, although for instance ``hydra.main`` has initialized it."""
    of_caller = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = of_caller


def is_below(key: str, names: Collection[str]) -> bool:
    """Returns whether the dotted ``key`` or a table that has it is among ``names``."""
    parts = key.split(".")
    return any(".".join(parts[: count + 1]) in names for count in range(len(parts)))


def _places(line: CommandLine) -> Iterator[tuple[str, str]]:
    """Yields keys with what sets them, the weakest first."""
    yield from ((key, place_of(file, value)) for key, file, value in _keys_of_files(line))
    for text in line.overrides:
        override = parsed_override(text)
        value = override.value()
        key = override.key_or_group
        yield key, COMMAND_LINE
        if isinstance(value, Mapping):
            yield from ((f"{key}.{name}", COMMAND_LINE) for name, _ in _leaves(OmegaConf.create({**value})))


def _keys_of_files(line: CommandLine) -> Iterator[tuple[str, Path, Any]]:
    """Yields keys with the files that set them and the nodes of their values, the weakest file first."""
    for settings in read_settings():
        for key, value in leaves(read_yaml(settings.path)):
            yield RENAMED.get(key, key), settings.path, value
    yield from _keys_of_group_files(line)


def _keys_of_group_files(line: CommandLine) -> Iterator[tuple[str, Path, Any]]:
    """Yields the keys of the files in the Defaults List; arguments and results as of ``_keys_of_files``."""
    loader = GlobalHydra.instance().config_loader()
    assert isinstance(loader, ConfigLoaderImpl)
    schema = [WITH_STRATEGY] if line.overrides_strategy else []
    overrides = [*line.search_path, *schema, *(text for text in line.overrides if not is_search_path(text))]
    parsed, repository = loader._parse_overrides_and_create_caching_repo(line.config_name, overrides)
    for default in create_defaults_list(
        repository, line.config_name, parsed, prepend_hydra=True, skip_missing=False
    ).defaults:
        loaded = repository.load_config(str(default.config_path))
        assert loaded is not None
        file = Path(loaded.path.removeprefix("file://"), f"{default.config_path}.yaml")
        if not file.is_file():  # the schema, whose values are the defaults
            continue
        package = f"{default.package}." if default.package else ""
        for key, value in leaves(read_yaml(file)):
            if value.value != ROOT_OF_SETTINGS:
                name = f"{package}{key}"
                yield RENAMED.get(name, name), file, value


def _leaves(node: DictConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields dotted keys with their values; a list and an empty table are values."""
    for name in map(str, node):
        key = f"{prefix}{name}"
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_interpolation() and len(child):
            yield from _leaves(child, f"{key}.")
        else:
            yield key, plain(OmegaConf.create({"value": child}), resolve=False)["value"]
