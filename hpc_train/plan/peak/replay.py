"""Walks through what one rank allocates and frees in a step, and finds the moment at which it holds the most."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

from hpc_train.units import format_bytes

Part = Literal["parameters", "gradients", "optimizer", "activations", "hooks"]


class Change(NamedTuple):
    """A change of the memory of a rank.

    Attributes:
        size: bytes that are allocated, or freed if negative.
        moment: whether they are freed again before the next change.
    """

    part: Part
    size: float
    moment: bool = False


@dataclass(frozen=True)
class Memory:
    """Bytes on the device of one rank at the moment when it holds the most."""

    parameters: float  # with copies in the compute type
    gradients: float
    optimizer: float
    activations: float
    hooks: float = 0.0  # averages of the weights

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.hooks

    @property
    def largest(self) -> str:
        """Returns the name of the largest part."""
        return max(vars(self), key=lambda name: float(getattr(self, name)))

    def __str__(self) -> str:
        shown = {name: size for name, size in vars(self).items() if size or name != "hooks"}
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in shown.items())
        return f"{format_bytes(self.total)} ({parts})"


def replay(changes: Iterable[Change]) -> Memory:
    """Returns what is held at the peak of ``changes``, which begin with nothing."""
    held: dict[str, float] = dict.fromkeys((field.name for field in fields(Memory)), 0.0)
    total = most = 0.0
    peak = dict(held)
    for part, size, moment in changes:
        total += size
        held[part] += size
        if total > most:
            most, peak = total, dict(held)
        if moment:
            total -= size
            held[part] -= size
    return Memory(**peak)
