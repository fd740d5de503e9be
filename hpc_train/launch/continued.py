"""Keeps the frozen values of a run that is started again if a new version of hpc_train has other defaults."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from hpc_train.config.command_line import CommandLine
from hpc_train.config.origins import defaults, is_below
from hpc_train.config.removed import RENAMED
from hpc_train.config.schema import Config
from hpc_train.config.secrets import shown
from hpc_train.errors import UserError
from hpc_train.layout.resolve import AUTO, SIMPLEST
from hpc_train.opening import tell_once
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import is_present
from hpc_train.run.freeze import flat, load

PLACE = ("run.root", "run.name", "run.fork")  # keys of the run directory, which may have moved
CHOSEN = (*SIMPLEST, "strategy.for_nodes", "batch.micro_size")  # strategy=auto chooses these at each start


def with_frozen_defaults(config: Config, run: RunDirectory, line: CommandLine, overrides: Sequence[str]) -> Config:
    """Returns ``config`` with the frozen values of ``run`` for the keys whose defaults have changed.

    This applies to keys that neither the present command line, nor the command that froze the run, nor a file of the
    user or the site sets. A value that refers to other keys, such as ``${train.steps}``, is computed again. If the
    command chooses another file of a config group, the values of that file are used. Prints a note for each key. If the
    run does not exist or cannot be read, ``config`` is unchanged.

    Args:
        overrides: the overrides of the job, which is one of the jobs of ``line``.
    """
    if not is_present(run.config):
        return config
    try:
        frozen = load(run)
        record = run.record()
    except UserError:  # the check of the run reports it, unless this start replaces the damaged file
        return config
    keys_before, files_before = _split(record.get("overrides") or ())
    keys_now, files_now = _split(overrides)
    given = {*keys_before, *keys_now, *PLACE}
    given |= {group for group, _ in files_before.items() ^ files_now.items()}
    if AUTO in (frozen.strategy.name, config.strategy.name):
        given.update(CHOSEN)
    before = flat(frozen)
    now = flat(config)
    other = {key for key in before.keys() & now.keys() if before[key] != now[key] and not is_below(key, given)}
    if not other or "experiment" in given or frozen.train.debug or config.train.debug:  # these set keys of many groups
        return config
    present = defaults(replace(line, overrides=tuple(overrides)))
    result = deepcopy(config)
    for key in sorted(other):
        if key in present and present[key] == now[key]:
            _set(result, key, before[key])
            value = shown(key, before[key])
            tell_once(f"note: the run keeps {key}={value}; the default is now {shown(key, now[key])}")
    return result


def _split(overrides: Sequence[str]) -> tuple[set[str], dict[str, str]]:
    """Returns the keys that ``overrides`` set, and the file that they choose for each config group."""
    keys = set()
    files = {}
    for text in overrides:
        key, _, value = text.lstrip("+~").partition("=")
        if "." in key or value.startswith("{"):
            keys.add(RENAMED.get(key, key))
        else:
            files[key.partition("@")[0].replace("/", ".")] = value
    return keys, files


def _set(config: Config, key: str, value: Any) -> None:
    *groups, name = key.split(".")
    node: Any = config
    for group in groups:
        node = node[group] if isinstance(node, dict) else getattr(node, group)
    if isinstance(node, dict):
        node[name] = value
    else:
        setattr(node, name, value)
