"""Finds mistakes in the YAML files that the command line chooses, and names the file that sets a wrong key.

Hydra merges all files before values are checked: an error then has a key but no file, a list in place of a table does
not even have a key, and a time without quotes has become a number. The files are therefore read here as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import yaml

from hpc_train.config.command_line import CommandLine, parsed_override
from hpc_train.config.conf_files import config_directory
from hpc_train.config.run_path import relative
from hpc_train.config.schema import Config
from hpc_train.config.schema.key import MISSING
from hpc_train.config.settings import read_settings
from hpc_train.config.translate import KINDS_OF_NODES, instead_of, instead_of_key
from hpc_train.errors import UserError, UserErrors

GLOBAL = re.compile(r"^#\s*@package\s+_global_\s*$", re.MULTILINE)
PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)
GROUPS = get_type_hints(Config)
HYDRA_GROUP = re.compile(r"override\s+/?(hydra/(?:launcher|sweeper))")


def refuse_unreadable_files(line: CommandLine) -> None:
    """Checks the files that the command line chooses for mistakes that Hydra ignores or reports without a file name.
    Raises UserError if a file is not UTF-8 or not a table, its ``defaults`` are not a list or contain the file itself,
    or it has settings of Hydra's launcher.
    """
    chosen = _chosen(line)
    for group, path in chosen.items():
        if path.is_relative_to(config_directory()):
            continue
        name = relative(path)
        try:
            root = read_yaml(path)
        except UnicodeDecodeError as error:
            fix = "save the file as UTF-8"
            raise UserError(f"{name} is not UTF-8 ({error.reason})", where=name, fix=fix) from error
        except yaml.reader.ReaderError as error:
            what = f"{name} has a character that YAML does not allow (#x{error.character:04x})"
            raise UserError(what, where=name, fix="remove the character") from error
        defaults = _find(root, "defaults")
        if root is not None and not isinstance(root, yaml.MappingNode):
            raise UserError(f"{name} must be NAME: VALUE pairs", where=name, fix="one line NAME: VALUE for each key")
        if defaults is not None:
            where = place_of(path, defaults)
            if not isinstance(defaults, yaml.SequenceNode):
                raise UserError("defaults must be a list", where=where, fix="defaults: [NAME, _self_]")
            if path.stem in [node.value for node in defaults.value]:
                what = f"the defaults of {name} contain the file itself"
                raise UserError(what, where=where, fix="name another file there")
        if group == "experiment" and not PACKAGE.search(path.read_text(encoding="utf-8")):
            what = f"{name} is an experiment, and its keys would be below experiment"
            raise UserError(what, where=name, fix="start the file with `# @package _global_`")
    _check_hydra(chosen, line)


def check_files(line: CommandLine) -> None:
    """Raises UserError if a chosen YAML file is not valid, has a value of the wrong kind, or lacks one that must
    be given.
    """
    for settings in read_settings():
        _check(Config, settings.path)
    chosen = _chosen(line)
    for group, path in chosen.items():
        in_groups = GLOBAL.search(path.read_text(encoding="utf-8")) is not None
        _check(Config if in_groups else GROUPS.get(group), path)
    _check_missing(chosen, line)


def with_file(mistake: UserError, line: CommandLine) -> UserError:
    """Returns ``mistake`` with the chosen files that set its keys, if there are any."""
    if isinstance(mistake, UserErrors):
        return UserErrors((with_file(single, line) for single in mistake.found), mistake.head, mistake.most)
    chosen = _chosen(line)
    fix = mistake.fix
    places = []
    for place in mistake.where.split(", "):
        key = place.partition("=")[0]
        position = _position(key, chosen, line)
        if position is None:
            places.append(place)
            continue
        places.append(f"{place} in {position}")
        if key.partition(".")[2] in GROUPS:
            fix = "start the file with `# @package _global_` and put the keys of each group below its name, as in "
            fix += "conf/cluster/roihu.yaml"
    where = ", ".join(places)
    if where == mistake.where:
        return mistake
    return UserError(mistake.what, where=where, fix=fix, jobs=mistake.jobs)


def _position(key: str, chosen: Mapping[str, Path], line: CommandLine) -> str | None:
    """Returns the chosen file of the user, or the settings, that set ``key``, and the line; None if no file does."""
    if _is_overridden(key, line):
        return None
    group, _, name = key.partition(".")
    path = chosen.get(group)
    try:
        if path is not None and not path.is_relative_to(config_directory()):
            is_nested = not GLOBAL.search(path.read_text(encoding="utf-8"))
            if (node := _find(read_yaml(path), name if is_nested else key)) is not None:
                return place_of(path, node)
        for settings in reversed(read_settings()):
            root = read_yaml(settings.path)
            if key in settings.choices:
                return place_of(settings.path, _find(root, "defaults"))
            if name and (node := _find(root, key)) is not None:
                return place_of(settings.path, node)
    except (OSError, yaml.YAMLError):
        pass
    return None


def place_of(path: Path, node: Any) -> str:
    """Returns the file and the line of a node of ``read_yaml``, such as ``conf/cluster/here.yaml:7``."""
    return f"{relative(path)}:{node.start_mark.line + 1}"


def _chosen(line: CommandLine) -> dict[str, Path]:
    """Returns the files that overrides such as ``cluster=here`` choose, by group."""
    directories = [*line.directories, config_directory()]
    chosen = {}
    for override in map(parsed_override, line.overrides):
        group = override.key_or_group
        name = override.value()
        if isinstance(name, str) and "." not in group:
            paths = (directory / group / f"{name}.yaml" for directory in directories)
            if path := next(filter(Path.is_file, paths), None):
                chosen[group] = path
    return chosen


def _is_overridden(key: str, line: CommandLine) -> bool:
    return any(key == parsed_override(text).key_or_group for text in line.overrides)


def _check(schema: Any, path: Path) -> None:
    """Checks the kinds of the values of a file whose keys are those of ``schema``."""
    root = read_yaml(path)
    for key, node in leaves(root):
        if isinstance(node, yaml.ScalarNode) and node.tag.endswith(":int") and ":" in node.value:
            number = yaml.safe_load(node.value)
            raise UserError(
                f"{key} is {node.value} without quotes, which YAML reads as the number {number}",
                where=place_of(path, node),
                fix=f'{key}: "{node.value}"',
            )
    for key, kind in _tables_and_lists(schema):
        node = _find(root, key)
        if node is None or isinstance(node, kind):
            continue
        if isinstance(node, yaml.ScalarNode) and (node.tag.endswith(":null") or "${" in node.value):
            continue
        must, fix = KINDS_OF_NODES[kind]
        raise UserError(f"{key} must be {must}", where=place_of(path, node), fix=fix)


def _check_missing(chosen: Mapping[str, Path], line: CommandLine) -> None:
    """Reports a value ``???`` in a user's file that nothing else sets. OmegaConf merges it as if it were absent."""
    values = [(path, key, node) for group, path in chosen.items() for key, node in _full_leaves(group, path)]
    present = {key for _, key, node in values if node.value != MISSING}
    for path, key, node in values:
        is_packaged = path.is_relative_to(config_directory())
        if node.value == MISSING and key not in present and not is_packaged and not _is_overridden(key, line):
            where = f"{key} in {place_of(path, node)}"
            raise UserError(f"{key} has no value", where=where, fix=f"{key}=VALUE on the command line, or in that file")


def _check_hydra(chosen: Mapping[str, Path], line: CommandLine) -> None:
    """Rejects settings of Hydra's launcher and choices of its groups in the chosen files, which Hydra drops silently.

    The main config chooses these groups too, and its choice takes precedence over the choice of a file that it
    includes.
    """
    for group, path in chosen.items():
        entries = getattr(_find(read_yaml(path), "defaults"), "value", ())
        tables = [entry for entry in entries if isinstance(entry, yaml.MappingNode)]
        for name, value in (pair for table in tables for pair in table.value):
            of_hydra = HYDRA_GROUP.fullmatch(name.value)
            if of_hydra is not None and value.value != "hpc_train":
                choice = f"{of_hydra[1]}={value.value}"
                where = place_of(path, name)
                fix = instead_of(of_hydra[1], value.value) or f"remove the line, and put {choice} on the command line"
                raise UserError(f"{choice} has no effect in the defaults of this file", where=where, fix=fix)
        for key, node in _full_leaves(group, path):
            if key.startswith("hydra.launcher.") and not _is_overridden("hydra/launcher", line):
                where = f"{key} in {place_of(path, node)}"
                raise UserError(f"{key} has no effect", where=where, fix=instead_of_key(key) or "remove it")


def _full_leaves(group: str, path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the keys that the file of ``group`` sets, with the name of their group, and the nodes of their values."""
    prefix = "" if GLOBAL.search(path.read_text(encoding="utf-8")) else f"{group}."
    yield from ((f"{prefix}{key}", node) for key, node in leaves(read_yaml(path)))


def read_yaml(path: Path) -> Any:
    """Returns the nodes of a file, which know their lines; None for an empty file."""
    with path.open(encoding="utf-8") as file:
        return yaml.compose(file, Loader=yaml.SafeLoader)


def leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted key and the node of each scalar below ``node``; items of a list have the key of the list."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            yield from leaves(value, f"{key}.{name.value}".lstrip("."))
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from leaves(value, key)
    elif node is not None:
        yield key, node


def _find(node: Any, key: str) -> Any:
    """Returns the node of the value of ``key`` (dotted); None if it is not set."""
    for name in key.split("."):
        if not isinstance(node, yaml.MappingNode):
            return None
        node = next((value for key_node, value in node.value if key_node.value == name), None)
    return node


def _tables_and_lists(schema: Any) -> Iterator[tuple[str, type]]:
    """Yields the keys of ``schema`` whose values are tables or lists, with the kind of their YAML node."""
    if not is_dataclass(schema):
        return
    kinds: Mapping[Any, type] = {dict: yaml.MappingNode, list: yaml.SequenceNode}
    for name, kind in get_type_hints(schema).items():
        if get_origin(kind) in kinds:
            yield name, kinds[get_origin(kind)]
        elif is_dataclass(kind):
            yield from ((f"{name}.{key}", node) for key, node in _tables_and_lists(kind))
