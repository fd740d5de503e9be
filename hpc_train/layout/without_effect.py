"""Finds the keys that a user sets although nothing reads them in this job, such as ``optim.betas`` with SGD.

The schema states when a key is read (``config.schema.key``). Such a key gets a notice and is not a mistake,
because the jobs of a sweep over optimizers or strategies share their other keys. This module imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from hpc_train.config.command_line import CommandLine
from hpc_train.config.compose import PRIMARY, config_directory
from hpc_train.config.jobs import parsed_override
from hpc_train.config.own_files import PACKAGE, chosen_by, find_file, leaves, read_yaml
from hpc_train.config.schema import Config
from hpc_train.config.schema.key import FACTS, KeyInfo, info
from hpc_train.config.secrets import shown_override
from hpc_train.config.translate import relative
from hpc_train.config.values import runs_own_code
from hpc_train.layout.layout import JobShape, Layout, Place
from hpc_train.layout.recomputation import OFFLOAD, kept_if_less
from hpc_train.units import format_bytes

# groups whose keys custom code reads as it likes; ``layout.user_code`` says what applies
READ_BY_OWN_CODE = ("strategy", "model", "data", "optim", "precision", "train", "batch", "checkpoint")
SHOWN_JOBS = 5


@dataclass(frozen=True)
class WithoutEffect:
    """A key that a job does not read.

    Attributes:
        key: its dotted name.
        shown: the override, or the key with its file.
        reason: continues "has no effect".
        fix: what gives it an effect.
    """

    key: str
    shown: str
    reason: str
    fix: str


def without_effect(config: Config, layout: Layout, shape: JobShape, own: Mapping[str, str]) -> list[WithoutEffect]:
    """Returns the keys among ``own`` that this job does not read.

    Args:
        own: the keys that the user sets, by dotted name, as messages show them.
    """
    facts = facts_of(config, layout, shape)

    def value_of(subject: str) -> Any:
        return facts[subject] if subject in FACTS else _value(config, subject)

    found = []
    for name, shown in own.items():
        known = None if _belongs_to_own_code(config, name) else _find(config, name)
        failed = next((each for each in known.reads if not each.holds(value_of)), None) if known is not None else None
        if failed is not None:
            found.append(WithoutEffect(name, shown, failed.fails(value_of), failed.fix))
    kept = kept_if_less(config, layout) if OFFLOAD in own else None
    if kept is not None:
        reason = f"on layers that keep {format_bytes(kept)} for a micro-batch"
        found.append(WithoutEffect(OFFLOAD, own[OFFLOAD], reason, f"set {OFFLOAD} to less than the size of a tensor"))
    return found


def _belongs_to_own_code(config: Config, name: str) -> bool:
    return runs_own_code(config) and name.partition(".")[0] in READ_BY_OWN_CODE


def facts_of(config: Config, layout: Layout, shape: JobShape) -> dict[str, bool]:
    """Returns the value of each of ``FACTS`` for a job."""
    path = getattr(config.data, "path", None)
    hub = getattr(config.model, "name_or_path", None)
    several = layout.dp_cp > 1
    launched = shape.place is not Place.FOREGROUND
    return {
        "launched": launched,
        "submitted": shape.place is Place.SLURM,
        "step": launched and shape.in_job,
        "in_job": shape.in_job,
        "gpus": shape.gpus > 0,
        "cpus": shape.gpus == 0,
        "nodes": shape.nodes + config.elastic.spares > 1,
        "replicas": several,
        "buckets": several and not layout.kind.shards and not layout.logical_micro_batches,
        "shards": layout.shards_state,
        "pipeline": layout.pp > 1,
        "directory": path is None or Path(str(path)).is_dir(),
        "hub": hub is None or not Path(str(hub)).is_dir(),
    }


def _value(config: Config, key: str) -> Any:
    node: Any = config
    for name in key.split("."):
        node = getattr(node, name, None)
    return node


def _find(config: Config, key: str) -> KeyInfo | None:
    """Returns what the schema says about ``key``, or about the table that has it."""
    node: Any = config
    for name in key.split("."):
        each = next((each for each in fields(node) if each.name == name), None) if is_dataclass(node) else None
        if each is None:
            return None
        known = info(each)
        node = getattr(node, name)
        if known is not None and not is_dataclass(node):
            return known
    return None


def notices(jobs: Mapping[int, Sequence[WithoutEffect]]) -> list[str]:
    """Returns one line for the keys that have no effect for the same reason, from the keys of jobs by their number."""
    alike: dict[tuple[str, str, tuple[int, ...]], dict[str, set[str]]] = {}
    for (key, reason, fix), (numbers, shown) in _by_key(jobs).items():
        alike.setdefault((reason, fix, tuple(numbers)), {})[key] = shown
    return [_line(reason, fix, where, keys, len(jobs)) for (reason, fix, where), keys in alike.items()]


def _by_key(jobs: Mapping[int, Sequence[WithoutEffect]]) -> dict[tuple[str, str, str], tuple[list[int], set[str]]]:
    found: dict[tuple[str, str, str], tuple[list[int], set[str]]] = {}
    for number, unread in jobs.items():
        for each in unread:
            numbers, shown = found.setdefault((each.key, each.reason, each.fix), ([], set()))
            numbers.append(number)
            shown.add(each.shown)
    return found


def _line(reason: str, fix: str, where: Iterable[int], keys: Mapping[str, set[str]], jobs: int) -> str:
    names = [next(iter(shown)) if len(shown) == 1 else key for key, shown in keys.items()]
    *first, last = names
    listed = f"{', '.join(first)} and {last} have" if first else f"{last} has"
    numbers = [*where]
    some = f" in {_jobs(numbers)}" if len(numbers) < jobs else ""
    return f"note: {listed} no effect {reason}{some}; remove {'them' if first else 'it'}, or {fix}"


def _jobs(numbers: Sequence[int]) -> str:
    named = ", ".join(map(str, numbers[:SHOWN_JOBS]))
    more = f" and {len(numbers) - SHOWN_JOBS} more" if len(numbers) > SHOWN_JOBS else ""
    return f"{'jobs' if len(numbers) > 1 else 'job'} {named}{more}"


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
