"""Describes one config key: its meaning, its default, and the values that it accepts.

Each key of the schema is a dataclass field made by ``key``. The checks and the config reference read the same metadata,
so a choice or a range is written down once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import Field, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any

from hpc_train.config.removed import removed_value
from hpc_train.errors import Mistakes, UserError, nearest


@dataclass(frozen=True)
class Fact:
    """Describes a fact of a job in the words of messages.

    Attributes:
        holds: continues "Read if", such as "the job uses GPUs".
        fails: continues "has no effect", such as "without GPUs".
        fix: what makes it hold.
    """

    holds: str
    fails: str
    fix: str


FACTS: dict[str, Fact] = {
    "launched": Fact("-m submits the run", "without -m", "add -m"),
    "submitted": Fact("the job is submitted to Slurm", "outside of jobs submitted to Slurm", "use cluster=slurm -m"),
    "step": Fact("-m runs the job on Slurm", "unless -m runs the job on Slurm", "use cluster=slurm -m"),
    "in_job": Fact("the run is in a Slurm job", "outside of Slurm jobs", "use cluster=slurm -m"),
    "gpus": Fact("the job uses GPUs", "on CPUs", "train on GPUs (cluster.gpus_per_node)"),
    "cpus": Fact("the job uses no GPU", "with GPUs", "set cluster.gpus_per_node=0"),
    "nodes": Fact("the job has several nodes", "on one node", "set cluster.nodes to 2 or more"),
    "replicas": Fact(
        "the layout has several data-parallel ranks",
        "with one data-parallel rank",
        "use several ranks and a strategy such as +strategy=dp",
    ),
    "buckets": Fact(
        "several data-parallel ranks reduce gradients in buckets (ddp, allreduce)",
        "unless ddp or allreduce reduces the gradients of several ranks",
        "use several ranks and a strategy such as +strategy=dp",
    ),
    "shards": Fact(
        "several data-parallel ranks use ZeRO",
        "without ZeRO",
        "use several ranks and +strategy=zero1, zero2, zero3 or hsdp",
    ),
    "pipeline": Fact(
        "the layout has several pipeline ranks",
        "without a pipeline",
        "use several ranks and a strategy such as +strategy=pp or hybrid",
    ),
    "directory": Fact(
        "data.path is a directory or null", "unless data.path is a directory or null", "set data.path to a directory"
    ),
    "hub": Fact("model.name_or_path is a name on the hub", "for a local directory", "name a model on the hub"),
}


@dataclass(frozen=True)
class When:
    """Holds if ``subject`` has one of ``values``, or if ``negated`` another value. ``subject`` is the dotted name of a
    key, or one of ``FACTS``, whose value is True or False."""

    subject: str
    values: tuple[Any, ...] = (True,)
    negated: bool = False

    def holds(self, value_of: Callable[[str], Any]) -> bool:
        """Returns whether the condition holds. ``value_of`` returns the value of a key or a fact."""
        current = value_of(self.subject)
        return any(type(current) is type(value) and current == value for value in self.values) is not self.negated

    def __str__(self) -> str:
        """Returns the condition, which continues "Read if"."""
        if self.subject in FACTS:
            return FACTS[self.subject].holds
        if self.negated and self.values == (None,):
            return f"{self.subject} is set"
        return f"{self.subject} is {'not ' if self.negated else ''}{_listed(self.values)}"

    def fails(self, value_of: Callable[[str], Any]) -> str:
        """Returns why a key has no effect, which continues "has no effect"."""
        if self.subject in FACTS:
            return FACTS[self.subject].fails
        current = value_of(self.subject)
        if isinstance(current, dict | list):
            return f"with this {self._key}"
        return f"with {self._key}={_text(current)}"

    @property
    def fix(self) -> str:
        """Returns what makes the condition hold."""
        if self.subject in FACTS:
            return FACTS[self.subject].fix
        if self.negated:
            return f"set {self._key}" + " to another value" * (self.values != (None,))
        if len(self.values) == 1:
            return f"set {self._key}={_listed(self.values)}"
        return f"set {self._key} to {_listed(self.values)}"

    @property
    def _key(self) -> str:
        """Returns what a user sets: ``optim=sgd`` in place of ``optim.name=sgd``."""
        return self.subject.removesuffix(".name")


@dataclass(frozen=True)
class AnyOf:
    """Holds if one of ``conditions`` holds."""

    conditions: tuple[When, ...]

    def holds(self, value_of: Callable[[str], Any]) -> bool:
        return any(condition.holds(value_of) for condition in self.conditions)

    def __str__(self) -> str:
        return " or ".join(map(str, self.conditions))

    def fails(self, value_of: Callable[[str], Any]) -> str:
        reasons = dict.fromkeys(condition.fails(value_of) for condition in self.conditions)
        return " and ".join([*reasons]).replace(" and with ", " and ")

    @property
    def fix(self) -> str:
        return " or ".join(condition.fix for condition in self.conditions)


Condition = When | AnyOf


def when(subject: str, *values: Any) -> When:
    """Returns the condition that a key has one of ``values``, or that a fact holds."""
    return When(subject, values or (True,))


def unless(subject: str, *values: Any) -> When:
    """Returns the condition that a key has none of ``values``."""
    return When(subject, values, negated=True)


def any_of(*conditions: When) -> AnyOf:
    """Returns the condition that one of ``conditions`` holds."""
    return AnyOf(conditions)


NOT_DEBUGGED = when("train.debug", False)


def _listed(values: tuple[Any, ...]) -> str:
    *first, last = map(_text, values)
    return f"{', '.join(first)} or {last}" if first else last


def _text(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


_METADATA = "hpc_train"
MISSING: Any = "???"  # omegaconf.MISSING; workers read the schema and need nothing else of OmegaConf
LARGEST = 2**63 - 1  # torch has no larger integers; infinity is larger


@dataclass(frozen=True)
class KeyInfo:
    """Holds the facts about one key.

    Attributes:
        meaning: one or two plain sentences.
        choices: the words that the key accepts; a key that accepts numbers accepts them in addition to these words.
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
        """Returns the sentence that says when the key has an effect; empty if it always has one."""
        return f"Read if {', and if '.join(map(str, self.reads))}." if self.reads else ""

    @property
    def range(self) -> str:
        """Returns the accepted numbers as text; empty if any number is accepted."""
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
    """Returns a dataclass field with its default and the facts of ``KeyInfo``. ``when`` is the condition, or several of
    which all must hold, under which the key has an effect."""
    reads = when if isinstance(when, tuple) else (when,)
    metadata = {_METADATA: KeyInfo(meaning, reads=reads, **facts)}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def required(meaning: str, **facts: Any) -> Any:
    """Returns a field without a default, which the user or a file of ``conf/`` must set."""
    return key(MISSING, meaning, **facts)


def group(schema: type) -> Any:
    """Returns a field that holds a nested group of keys."""
    return field(default_factory=schema)


def info(field: Field[Any]) -> KeyInfo | None:
    """Returns the facts about a field; None if ``key`` did not create it."""
    facts: KeyInfo | None = field.metadata.get(_METADATA)
    return facts


def keys(node: Any, path: str = "") -> Iterator[tuple[str, Any, KeyInfo]]:
    """Yields name (dotted), value and facts of every key with metadata below the dataclass instance ``node``."""
    for name, facts in _fields(node.__class__):
        value = getattr(node, name)
        full_name = f"{path}.{name}".lstrip(".")
        if is_dataclass(value):
            yield from keys(value, full_name)
        elif facts is not None:
            yield full_name, value, facts


@cache
def _fields(schema: type) -> list[tuple[str, KeyInfo | None]]:
    return [(field.name, info(field)) for field in fields(schema)]


def check_keys(node: Any, path: str = "") -> None:
    """Raises UserError with all values below ``node`` that are neither a choice of their key nor in its range."""
    mistakes = Mistakes()
    for name, value, info in keys(node, path):
        if not _accepts(info, value):
            with mistakes.collected():
                raise _not_accepted(name, value, info)
    mistakes.report()


def _accepts(info: KeyInfo, value: Any) -> bool:
    if isinstance(value, str):
        is_path = ":" in value and any(":" in choice for choice in info.choices)  # package.module:NAME
        return not info.choices or value in info.choices or is_path
    if not isinstance(value, int | float) or isinstance(value, bool):
        return True
    return info.holds(value) and abs(value) <= LARGEST  # False for NaN too


def _not_accepted(name: str, value: Any, info: KeyInfo) -> UserError:
    if isinstance(value, str):
        removed = removed_value(name, value)
        if removed is not None:
            return removed
        fix = nearest(value, info.choices)
        if info.range:
            fix = f"a number {info.range}, or {fix}"
        return UserError(f"{name} is {value!r}", where=name, fix=fix)
    if not info.holds(value):
        fix = f"{name}=N, {info.range}"
        if "null" in info.meaning:
            fix += f", or {name}=null"
        return UserError(f"{name} is {value}, but must be {info.range}", where=name, fix=fix)
    if value != value:  # noqa: PLR0124 - NaN
        return UserError(f"{name} is not a number", where=name, fix=f"{name}=N")
    return UserError(f"{name} is {value}, which is too large", where=name, fix=f"{name}=N, below 2^63")
