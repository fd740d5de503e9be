"""Walks through what one rank allocates and frees in a step, and finds the moment at which it holds the most."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from typing import Literal, NamedTuple

from hpc_train.units import format_bytes

Part = Literal["parameters", "gradients", "optimizer", "activations", "hooks"]


class Change(NamedTuple):
    """A change of the memory of a rank.

    Attributes:
        size: bytes that are allocated, or freed if negative.
        moment: whether they are freed again before the next change.
        in_layer: whether compiled layers hold them, and so the memory pool of their CUDA graphs if there are any.
    """

    part: Part
    size: float
    moment: bool = False
    in_layer: bool = False


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

    def __add__(self, other: Memory) -> Memory:
        return Memory(*(own + theirs for own, theirs in zip(astuple(self), astuple(other), strict=True)))

    @property
    def largest(self) -> str:
        """Returns the name of the largest part."""
        return max(vars(self), key=lambda name: float(getattr(self, name)))

    def __str__(self) -> str:
        shown = {name: size for name, size in vars(self).items() if size or name != "hooks"}
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in shown.items())
        return f"{format_bytes(self.total)} ({parts})"


PARTS = {field.name: place for place, field in enumerate(fields(Memory))}


class Passage(NamedTuple):
    """Describes what a pass does to the memory of a rank, in bytes; the tuples have one number for each part.

    Attributes:
        net: what it leaves more than there was before.
        peak: what it holds more than there was before, at its peak.
    """

    net: tuple[float, ...]
    peak: tuple[float, ...]
    total: float
    height: float


def passage(changes: Iterable[Change]) -> Passage:
    """Returns the sum of ``changes`` and their peak."""
    held = [0.0] * len(PARTS)
    total = height = 0.0
    peak = tuple(held)
    for part, size, moment, _ in changes:
        place = PARTS[part]
        total += size
        held[place] += size
        if total > height:
            height, peak = total, tuple(held)
        if moment:
            total -= size
            held[place] -= size
    return Passage(tuple(held), peak, total, height)


def replay(passages: Iterable[Passage]) -> Memory:
    """Returns what is held at the peak of ``passages``, which begin with nothing."""
    held = most = tuple([0.0] * len(PARTS))
    total = height = 0.0
    for each in passages:
        if total + each.height > height:
            height, most = total + each.height, tuple(map(sum, zip(held, each.peak, strict=True)))
        total += each.total
        held = tuple(map(sum, zip(held, each.net, strict=True)))
    return Memory(*most)


def exceeds(passages: Iterable[Passage], limit: float) -> bool:
    """Returns whether more than ``limit`` is held at a moment; takes ``passages`` until then only."""
    total = 0.0
    for each in passages:
        if total + each.height > limit:
            return True
        total += each.total
    return False
