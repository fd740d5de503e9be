"""Finds the keys that a user sets for a job: on the command line, and in config files of the user's own.

Files of the user are those outside of ``conf/`` that an override, or the Defaults List of such a file, chooses. Keys
that the files of ``conf/`` set do not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from hpc_train.config.command_line import CommandLine
from hpc_train.config.compose import PRIMARY, config_directory
from hpc_train.config.jobs import parsed_override
from hpc_train.config.own_files import PACKAGE, chosen_by, find_file, leaves, read_yaml
from hpc_train.config.secrets import shown_override
from hpc_train.config.translate import relative

SHOWN = 60  # characters of an override in a message
NO_VALUES = ("null", "false")


def user_keys(line: CommandLine, overrides: Sequence[str]) -> dict[str, str]:
    """Returns the dotted keys that the user sets, with the override or the place in a file, for messages.

    A key that is null or false is left out, and so is one to which another value refers as ``${KEY}``.

    Args:
        overrides: those of one job of ``line``.
    """
    files = _own_files(line, overrides)
    found = {key: place for path, package in files for key, place in _keys_of(path, package)}
    for text in overrides:
        override = parsed_override(text)
        if not override.is_delete():
            shown = "" if isinstance(override.value(), dict) else _shown(text)
            found |= {key: shown or key for key in _set_by(override.key_or_group, override.value())}
    texts = [*overrides, *(path.read_text(encoding="utf-8") for path, _ in files)]
    mentions = " ".join(text for text in texts if "${" in text)
    return {key: shown for key, shown in found.items() if not _is_mentioned(key, mentions)}


def _is_mentioned(key: str, text: str) -> bool:
    return key in text and re.search(rf"\$\{{[^}}]*\b{re.escape(key)}\b", text) is not None


def _shown(override: str) -> str:
    text = shown_override(override).lstrip("+")
    return text if len(text) <= SHOWN else text.partition("=")[0]


def _set_by(key: str, value: Any) -> Iterator[str]:
    """Yields the dotted keys of an override. A choice of a group yields the name of the group, which is not a key."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _set_by(f"{key}.{getattr(name, 'text', name)}", each)
    elif value is not None and value is not False:
        yield key


@lru_cache(maxsize=256)
def _keys_of(path: Path, package: str) -> list[tuple[str, str]]:
    """Returns the keys that a file sets, with their places."""
    found = []
    for key, node in leaves(read_yaml(path)):
        if key.partition(".")[0] not in ("defaults", "hydra") and node.value.lower() not in NO_VALUES:
            name = f"{package}.{key}".lstrip(".")
            found.append((name, f"{name} in {relative(path)}:{node.start_mark.line + 1}"))
    return found


Included = tuple[Path, str, str | None]  # a file, its group, and the package that the Defaults List gives it


def _own_files(line: CommandLine, overrides: Sequence[str]) -> list[tuple[Path, str]]:
    """Returns the user's files with their packages, each before those that its Defaults List names."""
    directories = [*line.directories, config_directory()]
    waiting: list[Included] = [(path, group, None) for group, path in chosen_by(overrides, directories).items()]
    if line.config_name != PRIMARY and (primary := find_file("", line.config_name, directories)) is not None:
        waiting.append((primary, "", None))
    found: dict[Path, str] = {}
    while waiting:
        path, group, package = waiting.pop(0)
        if path in found or path.is_relative_to(config_directory()):
            continue
        found[path] = _package(path, group, package)
        waiting += _included(path, group, directories)
    return [*found.items()]


@lru_cache(maxsize=256)
def _package(path: Path, group: str, given: str | None) -> str:
    written = PACKAGE.search(path.read_text(encoding="utf-8"))
    named = given or (written[1] if written else "_group_")
    return {"_global_": "", "_group_": group.replace("/", ".")}.get(named, named)


def _included(path: Path, group: str, directories: Sequence[Path]) -> Iterator[Included]:
    """Yields the files in the Defaults List of ``path``: ``NAME``, or ``[override] [/]GROUP[@PACKAGE]: NAME``."""
    listed = _read_plain(path)
    for entry in (listed.get("defaults") or []) if isinstance(listed, Mapping) else []:
        ((option, names),) = entry.items() if isinstance(entry, dict) else [("", entry)]
        words = re.sub(r"^((override|optional)\s+)+", "", option)
        for name in names if isinstance(names, list) else [names]:
            chosen, _, package = (words or str(name)).partition("@")
            whole = f"{chosen}/{name}" if words else chosen
            folder, _, stem = (whole if whole.startswith("/") else f"{group}/{whole}").strip("/").rpartition("/")
            found = None if stem == "_self_" else find_file(folder, stem, directories)
            if found is not None:
                yield found, folder, package or None


@lru_cache(maxsize=256)
def _read_plain(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))
