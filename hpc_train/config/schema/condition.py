"""States when a key has an effect. The reference shows it, and a notice names a key that a user sets without one.

A condition is about the value of another key, or about a fact of the job that no single key decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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
    """Holds if ``subject`` has one of ``values``, or if ``negated`` another value.

    Attributes:
        subject: the dotted name of a key, or one of ``FACTS``, whose value is True or False.
    """

    subject: str
    values: tuple[Any, ...] = (True,)
    negated: bool = False

    def holds(self, value_of: Callable[[str], Any]) -> bool:
        """Returns whether the condition holds.

        Args:
            value_of: returns the value of a key or a fact.
        """
        found = value_of(self.subject)
        return any(type(found) is type(value) and found == value for value in self.values) is not self.negated

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
        found = value_of(self.subject)
        return f"with this {self._key}" if isinstance(found, dict | list) else f"with {self._key}={_text(found)}"

    @property
    def fix(self) -> str:
        """Returns what makes the condition hold."""
        if self.subject in FACTS:
            return FACTS[self.subject].fix
        if not self.negated:
            return f"set {self._key}{'=' if len(self.values) == 1 else ' to '}{_listed(self.values)}"
        return f"set {self._key}" + ("" if self.values == (None,) else " to another value")

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
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
