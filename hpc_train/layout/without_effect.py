"""Finds the keys that a user sets but that have no effect in this job, such as ``optim.betas`` with SGD.

A user sets keys on the command line, and in config files outside of ``conf/`` that an override or the Defaults List of
such a file selects. The schema states when a key is read (``config.schema.key``). A key without effect causes a notice,
not an error, because the jobs of a sweep over optimizers or strategies share their other keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

from hpc_train.config.command_line import CommandLine, parsed_override
from hpc_train.config.origins import keys_of_own_files
from hpc_train.config.own_files import place_of
from hpc_train.config.schema import Config
from hpc_train.config.schema.key import FACTS, KeyInfo, info
from hpc_train.config.secrets import shown_override
from hpc_train.config.values import runs_own_code
from hpc_train.layout.layout import JobShape, Layout, Place
from hpc_train.layout.recomputation import OFFLOAD, kept_if_less
from hpc_train.units import format_bytes

# groups whose keys custom code may read; ``layout.user_code`` checks which keys apply
READ_BY_USER_CODE = ("strategy", "model", "data", "optim", "precision", "train", "batch", "checkpoint")
LONGEST = 60  # characters of an override in a message
SHOWN_JOBS = 5


@dataclass(frozen=True)
class WithoutEffect:
    """A key that a job does not read.

    Attributes:
        key: its dotted name.
        shown: the override, or the key with its file, for messages.
        reason: the continuation of "has no effect".
        fix: the setting that gives it an effect.
    """

    key: str
    shown: str
    reason: str
    fix: str


def without_effect(config: Config, layout: Layout, shape: JobShape, user: Mapping[str, str]) -> list[WithoutEffect]:
    """Returns the keys among ``user`` that this job does not read.

    Args:
        user: the dotted names of the keys that the user sets, with the text that messages show.
    """
    facts = facts_of(config, layout, shape)

    def value_of(subject: str) -> Any:
        if subject in FACTS:
            return facts[subject]
        node: Any = config
        for name in subject.split("."):
            node = getattr(node, name, None)
        return node

    unread = []
    for key, shown in user.items():
        if runs_own_code(config) and key.partition(".")[0] in READ_BY_USER_CODE:
            continue
        key_info = _info_of(config, key)
        if key_info is None:
            continue
        failed = next((condition for condition in key_info.reads if not condition.holds(value_of)), None)
        if failed is not None:
            unread.append(WithoutEffect(key, shown, failed.fails(value_of), failed.fix))
    if OFFLOAD in user:
        kept = kept_if_less(config, layout)
        if kept is not None:
            reason = f"on layers that keep {format_bytes(kept)} for a micro-batch"
            fix = f"set {OFFLOAD} to less than the size of a tensor"
            unread.append(WithoutEffect(OFFLOAD, user[OFFLOAD], reason, fix))
    return unread


def facts_of(config: Config, layout: Layout, shape: JobShape) -> dict[str, bool]:
    """Returns the value of each of ``FACTS`` for a job."""
    path = getattr(config.data, "path", None)
    hub = getattr(config.model, "name_or_path", None)
    several = layout.dp_cp > 1
    launched = shape.place is not Place.FOREGROUND
    return {
        "launched": launched,
        "submitted": shape.place is Place.QUEUE,
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


def _info_of(config: Config, key: str) -> KeyInfo | None:
    """Returns the description of ``key`` in the schema, or of the table that contains the key."""
    node: Any = config
    for name in key.split("."):
        if not is_dataclass(node) or name not in node.__dataclass_fields__:
            return None
        facts = info(node.__dataclass_fields__[name])
        node = getattr(node, name)
        if facts is not None and not is_dataclass(node):
            return facts
    return None


def notices(jobs: Mapping[int, Sequence[WithoutEffect]]) -> list[str]:
    """Returns one line for all keys that have no effect for the same reason. ``jobs`` maps the number of a job to its
    keys."""
    places: dict[tuple[str, str, str], tuple[list[int], set[str]]] = {}
    for number, unread in jobs.items():
        for row in unread:
            numbers, shown = places.setdefault((row.key, row.reason, row.fix), ([], set()))
            numbers.append(number)
            shown.add(row.shown)
    alike: dict[tuple[str, str, tuple[int, ...]], list[str]] = {}
    for (key, reason, fix), (numbers, shown) in places.items():
        name = shown.pop() if len(shown) == 1 else key
        alike.setdefault((reason, fix, tuple(numbers)), []).append(name)
    lines = []
    for (reason, fix, numbers_of_jobs), (*first, last) in alike.items():
        where = ""
        if len(numbers_of_jobs) < len(jobs):
            where = f" in job{'s' * (len(numbers_of_jobs) > 1)} {', '.join(map(str, numbers_of_jobs[:SHOWN_JOBS]))}"
            if len(numbers_of_jobs) > SHOWN_JOBS:
                where += f" and {len(numbers_of_jobs) - SHOWN_JOBS} more"
        if first:
            lines.append(f"note: {', '.join(first)} and {last} have no effect {reason}{where}; remove them, or {fix}")
        else:
            lines.append(f"note: {last} has no effect {reason}{where}; remove it, or {fix}")
    return lines


# The keys that a user sets


def user_keys(line: CommandLine, overrides: Sequence[str]) -> dict[str, str]:
    """Returns the dotted keys that the user sets, with the override or the line in a file, for messages.

    A key is left out if it is null or false, or if another value refers to it as ``${KEY}``.

    Args:
        overrides: the overrides of one job of ``line``.
    """
    rows = keys_of_own_files(line, overrides)
    places = {
        key: f"{key} in {place_of(path, node)}"
        for key, path, node in rows
        if node.value.lower() not in ("null", "false")
    }
    for text in overrides:
        override = parsed_override(text)
        if override.is_delete():
            continue
        shown = shown_override(text).lstrip("+")
        if len(shown) > LONGEST:
            shown = shown.partition("=")[0]
        for key in _keys_set_by(override.key_or_group, override.value()):
            places[key] = key if isinstance(override.value(), dict) else shown
    mentions = " ".join(text for text in (*overrides, *(node.value for _, _, node in rows)) if "${" in text)
    return {
        key: shown
        for key, shown in places.items()
        if key not in mentions or not re.search(rf"\$\{{[^}}]*\b{re.escape(key)}\b", mentions)
    }


def _keys_set_by(key: str, value: Any) -> Iterator[str]:
    """Yields the dotted keys of an override. The choice of a group file yields the name of the group, which is not a
    key."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _keys_set_by(f"{key}.{getattr(name, 'text', name)}", item)
    elif value is not None and value is not False:
        yield key
