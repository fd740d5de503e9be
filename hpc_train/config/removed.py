"""Config keys of earlier versions: what replaces them, and which of their values a frozen run may have had.

A config that still sets such a key is refused with the replacement. A run that an earlier version froze is read without
the key, unless its value changed what the run computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpc_train.errors import UserError


@dataclass(frozen=True)
class Removed:
    """Describes one removed key, or a removed table of keys.

    Attributes:
        fix: what replaces it.
        same: the values with which a frozen run computes the same without the key; None for all values.
    """

    fix: str
    same: tuple[Any, ...] | None = None


REMOVED: dict[str, Removed] = {
    "train.gc_every": Removed("remove it; Python's garbage collections run every 100 steps on all ranks"),
}


def replacement_of(key: str) -> str | None:
    """Returns what replaces a removed ``key``, or the removed table that contains it; None for other keys."""
    names = key.split(".")
    heads = (".".join(names[: length + 1]) for length in range(len(names)))
    return next((REMOVED[head].fix for head in heads if head in REMOVED), None)


def without_removed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a frozen config without the removed keys.

    Raises:
        UserError: the value of a removed key changed what the run computes.
    """
    result = dict(config)
    for key, removed in REMOVED.items():
        result = _without(result, key.split("."), key, removed)
    return result


def _without(node: Mapping[str, Any], names: list[str], key: str, removed: Removed) -> dict[str, Any]:
    name, *rest = names
    result = dict(node)
    if name not in result:
        return result
    if rest:
        if isinstance(result[name], Mapping):
            result[name] = _without(result[name], rest, key, removed)
        return result
    value = result.pop(name)
    if removed.same is not None and value not in removed.same:
        raise UserError(
            f"the run was frozen with {key}={value}, which this version of hpc_train does not have",
            where=key,
            fix="use the version that froze it, or start a new run with another run.name",
        )
    return result
