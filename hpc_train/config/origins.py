"""Names the file, or the command line, that sets each key of a composed config: ``--cfg job --origins``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from hpc_train.config.command_line import CommandLine, is_choice, is_search_path, parsed_override
from hpc_train.config.compose import config_directory, plain
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
    of_caller = GlobalHydra.instance().hydra  # for instance the instance of ``hydra.main``
    GlobalHydra.instance().clear()
    try:
        with line.composer() as compose:
            values = dict(_leaves(compose(list(line.overrides))))
            files = [(key, file) for key, file, _ in _keys_of_files(line)]
    finally:
        GlobalHydra.instance().hydra = of_caller
    given = {key for key, file in files if not file.is_relative_to(config_directory())}
    given |= {override.key_or_group for override in map(parsed_override, line.overrides) if not is_choice(override)}
    return {key: value for key, value in values.items() if not is_below(key, given)}


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
    loader = GlobalHydra.instance().config_loader()
    assert isinstance(loader, ConfigLoaderImpl)
    overrides = [*line.search_path, *(text for text in line.overrides if not is_search_path(text))]
    _, repository = loader._parse_overrides_and_create_caching_repo(line.config_name, overrides)
    for default in loader.compute_defaults_list(line.config_name, overrides, RunMode.RUN).defaults:
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
