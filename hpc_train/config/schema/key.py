"""Describes one config key: its meaning, its default, and the values that it accepts.

Each key of the schema is a dataclass field made by ``key``. The checks and the config reference read the same metadata,
so a choice or a range is written down once.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import Field, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any

from hpc_train.config.removed import removed_value
from hpc_train.config.schema.condition import Condition
from hpc_train.errors import Mistakes, UserError, nearest

_METADATA = "hpc_train"
MISSING: Any = "???"  # omegaconf.MISSING; workers read the schema and need nothing else of OmegaConf
LARGEST = 2**63 - 1  # torch has no larger integers; infinity is larger


@dataclass(frozen=True)
class KeyInfo:
    """The facts about one key.

    Attributes:
        meaning: one or two plain sentences.
        choices: the words that the key accepts; a key that also accepts numbers accepts them beside these words.
        unit: of a number, for the reference.
        reads: the key has an effect only if all of these conditions hold.
    """

    meaning: str
    choices: tuple[str, ...] = ()
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    unit: str = ""
    reads: tuple[Condition, ...] = ()

    @property
    def condition(self) -> str:
        """The sentence that says when the key has an effect; empty if it always has one."""
        return f"Read if {', and if '.join(map(str, self.reads))}." if self.reads else ""

    @property
    def range(self) -> str:
        """The accepted numbers in words; empty where any number is accepted."""
        bounds = {"at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        return " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None)

    def holds(self, number: float) -> bool:
        """Returns whether ``number`` is in the range."""
        return (
            (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.at_most is None or number <= self.at_most)
            and (self.below is None or number < self.below)
        )


def key(default: Any, meaning: str, *, when: Condition | tuple[Condition, ...] = (), **facts: Any) -> Any:
    """A dataclass field with its default and what ``KeyInfo`` says about it.

    Args:
        when: the condition, or several of which all must hold, under which the key has an effect.
    """
    reads = when if isinstance(when, tuple) else (when,)
    metadata = {_METADATA: KeyInfo(meaning, reads=reads, **facts)}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def required(meaning: str, **facts: Any) -> Any:
    """A field that has no default: the user or a file of ``conf/`` sets it."""
    return key(MISSING, meaning, **facts)


def group(schema: type) -> Any:
    """A field that holds a nested group of keys."""
    return field(default_factory=schema)


def info(each: Field[Any]) -> KeyInfo | None:
    """The facts about a field; None where it was not made by ``key``."""
    found: KeyInfo | None = each.metadata.get(_METADATA)
    return found


def keys(node: Any, path: str = "") -> Iterator[tuple[str, Any, KeyInfo]]:
    """Every key below the dataclass instance ``node`` that has metadata: its dotted name, its value and its facts."""
    for own, known in _fields(node.__class__):
        value, name = getattr(node, own), f"{path}.{own}" if path else own
        if is_dataclass(value):
            yield from keys(value, name)
        elif known is not None:
            yield name, value, known


@cache
def _fields(schema: type) -> list[tuple[str, KeyInfo | None]]:
    return [(each.name, info(each)) for each in fields(schema)]


def check_keys(node: Any, path: str = "") -> None:
    """Checks every value below ``node`` against the choices and the range of its key.

    Raises:
        UserError: values are neither one of their key's choices nor in their key's range. The message reports all.
    """
    mistakes = Mistakes()
    for name, value, info in keys(node, path):
        if not _accepts(info, value):
            with mistakes.collected():
                raise _not_accepted(name, value, info)
    mistakes.report()


def _accepts(info: KeyInfo, value: Any) -> bool:
    if isinstance(value, str):
        return not info.choices or value in info.choices
    if not isinstance(value, int | float) or isinstance(value, bool):
        return True
    return info.holds(value) and abs(value) <= LARGEST  # False for NaN too


def _not_accepted(name: str, value: Any, info: KeyInfo) -> UserError:
    if isinstance(value, str):
        removed = removed_value(name, value)
        if removed is not None:
            return removed
        numbers = f"a number {info.range}, or " if info.range else ""
        return UserError(f"{name} is {value!r}", where=name, fix=f"{numbers}{nearest(value, info.choices)}")
    if not info.holds(value):
        return UserError(f"{name} is {value}, but must be {info.range}", where=name, fix=f"{name}=N, {info.range}")
    return UserError(f"{name} is {value}, which is too large or no number", where=name, fix=f"{name}=N, finite")
