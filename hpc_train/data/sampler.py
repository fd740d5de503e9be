"""Computes the sample indices of every rank from the step number, without other state.

The order of an epoch is one global sequence. A step takes the next ``global_size`` positions, and the ranks share
them. A run that resumes with another number of ranks continues the same sequence. The windows of data that a run skips
after a divergence are stored in its checkpoints, so that every resume uses the same order.

The random permutation of an epoch is computed in O(1) memory: a Feistel network is a bijection of b-bit numbers for any
round function, and applying it until the value falls below n ("cycle walking") gives a bijection of [0, n). See Black
and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002).

``TokenBalance`` batches samples of different lengths so that all ranks get about equally many tokens. It sorts the
samples of a global batch by length. Each micro-batch takes the next longest samples, and the rank with the fewest
tokens so far gets the next one. There is little padding, and all ranks compute with the same shape in every
micro-batch; in a pipeline all micro-batches have one shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from hpc_train.data.dataset import IGNORED, Array, Indices, Sample
from hpc_train.errors import UserError
from hpc_train.plan.layout import Layout

PADDING = -1  # a slot without a sample


@dataclass(frozen=True)
class Order:
    """The order of ``samples`` samples in global batches of ``global_size``.

    Attributes:
        drop_last: the samples that do not fill a last batch are left out of the epoch; without it that batch is padded.
        seed: of the permutation of each epoch; None keeps the order of the dataset (validation).

    Raises:
        UserError: no samples, or too few for one batch with ``drop_last``.
    """

    samples: int
    global_size: int
    drop_last: bool
    seed: int | None

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UserError("the dataset has no samples", where="data", fix="point data at a set with samples")
        if self.drop_last and self.samples < self.global_size:
            raise UserError(
                f"{self.samples} samples do not fill one global batch of {self.global_size}",
                where="batch.global_size",
                fix=f"batch.global_size={self.samples} or smaller, batch.drop_last=false (pads it), or more data",
            )

    @property
    def steps_per_epoch(self) -> int:
        return self.samples // self.global_size if self.drop_last else math.ceil(self.samples / self.global_size)

    def epoch_of(self, step: int) -> int:
        return step // self.steps_per_epoch

    def slots(self, step: int, first: int, last: int) -> Indices:
        """The samples at the positions [``first``, ``last``) of the step's global batch.

        Positions behind the end of the epoch and behind the global batch are ``PADDING``.
        """
        within = np.arange(first, last, dtype=np.int64)
        positions = step % self.steps_per_epoch * self.global_size + within
        filled = (within < self.global_size) & (positions < self.samples)
        slots = np.full(last - first, PADDING, dtype=np.int64)
        slots[filled] = self._samples_at(self.epoch_of(step), positions[filled])
        return slots

    def rank_batch(self, step: int, layout: Layout, dp_rank: int) -> Indices:
        """What one data-parallel rank reads in one step.

        Rank r of dp takes the positions [floor(r * G / dp), floor((r + 1) * G / dp)) of the global batch of G.

        Returns:
            ``[micro_batches, micro_size]`` sample indices in the global order, ``PADDING`` behind them.
        """
        if layout.logical_micro_batches:
            return self._logical_batch(step, layout, dp_rank)
        first = dp_rank * self.global_size // layout.dp
        last = (dp_rank + 1) * self.global_size // layout.dp
        slots = np.full(layout.micro_batches * layout.micro_size, PADDING, dtype=np.int64)
        if last - first > slots.size:
            raise ValueError(f"{last - first} samples of a rank in {slots.size} slots: the layout is of another batch")
        slots[: last - first] = self.slots(step, first, last)
        return slots.reshape(layout.micro_batches, layout.micro_size)

    def _logical_batch(self, step: int, layout: Layout, dp_rank: int) -> Indices:
        """The logical micro-batches of one rank. Number v of V takes [floor(v * G / V), floor((v + 1) * G / V))."""
        slots = np.full((layout.micro_batches, layout.micro_size), PADDING, dtype=np.int64)
        for row, logical in enumerate(layout.logical_of(dp_rank)):
            first = logical * self.global_size // layout.logical_micro_batches
            last = (logical + 1) * self.global_size // layout.logical_micro_batches
            slots[row, : last - first] = self.slots(step, first, last)
        return slots

    def template(self, step: int) -> int:
        """A sample of the step's global batch that is always there: its shape is the padding's."""
        return int(self.slots(step, 0, 1)[0])

    def _samples_at(self, epoch: int, positions: Indices) -> Indices:
        return positions if self.seed is None else Permutation(self.samples, self.seed, epoch)(positions)


ROUNDS = 12  # even, so that the halves end where they began; small domains need more than a cipher's four
_LEAST_BITS = 6  # halves of two bits are visibly uneven (chi-square over all orders of 4), of three not
_MASK_64 = (1 << 64) - 1


def mix(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): 64 bits in, 64 well mixed bits out."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


@dataclass(frozen=True)
class Permutation:
    """The permutation of [0, ``size``) that belongs to (``seed``, ``epoch``)."""

    size: int
    seed: int
    epoch: int

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The elements at ``positions`` (each in [0, size)), in the same shape.

        Raises:
            IndexError: a position outside of [0, size).
        """
        positions = np.asarray(positions, dtype=np.int64)
        if positions.size == 0:
            return positions.copy()
        if positions.min() < 0 or positions.max() >= self.size:
            raise IndexError(f"positions {positions.min()}..{positions.max()} outside of [0, {self.size})")
        keys = [self._key(number) for number in range(ROUNDS)]
        values = self._feistel(positions.astype(np.uint64).ravel(), keys)
        outside = np.flatnonzero(values >= self.size)
        while outside.size:
            walked = self._feistel(values[outside], keys)
            values[outside] = walked
            outside = outside[walked >= self.size]
        return values.astype(np.int64).reshape(positions.shape)

    def _feistel(self, values: NDArray[np.uint64], keys: list[np.uint64]) -> NDArray[np.uint64]:
        bits = max(_LEAST_BITS, (self.size - 1).bit_length())
        right_bits = bits // 2
        left_bits = bits - right_bits
        left, right = values >> np.uint64(right_bits), values & _mask(right_bits)
        for key in keys:
            left, right = right, left ^ (_scramble(right, key) & _mask(left_bits))
            left_bits, right_bits = right_bits, left_bits
        return (left << np.uint64(right_bits)) | right

    def _key(self, number: int) -> np.uint64:
        return np.uint64(mix(mix(mix(self.seed & _MASK_64) ^ self.epoch) ^ number))


def _mask(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)


def _scramble(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """``mix`` of ``values ^ key``, over an array; unsigned arithmetic wraps."""
    values = values ^ key
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@dataclass(frozen=True)
class Skipped:
    """``windows``: [first, last) positions in the sequence of global batches, in order, without overlap."""

    windows: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, value: Iterable[Sequence[int]]) -> Skipped:
        """From what JSON makes of ``windows``."""
        return cls(tuple((first, last) for first, last in value))

    def position(self, step: int) -> int:
        """The position of the batch that optimizer step ``step`` takes."""
        for first, last in self.windows:
            if step >= first:
                step += last - first
        return step

    def without(self, steps: range) -> Skipped:
        """Passes over the batches of ``steps`` as well: the first of them takes what the one after them took."""
        first, last = self.position(steps.start), self.position(steps.stop - 1) + 1
        others = [window for window in self.windows if window[1] <= first or last <= window[0]]
        return Skipped(tuple(sorted([*others, (first, last)])))


WIDTHS = 8  # different ones at most: each shape is compiled and planned for by itself


@dataclass(frozen=True)
class BatchRow:
    """One micro-batch of one rank: the samples of its slots (or ``PADDING``), all ``width`` tokens long."""

    slots: Indices
    width: int


@dataclass(frozen=True)
class TokenBalance:
    """``lengths``: tokens of each sample of the dataset."""

    lengths: Indices
    layout: Layout

    @property
    def widest(self) -> int:
        """Tokens of the longest sample, up to what tensor-parallel ranks can share."""
        return _round_up(int(self.lengths.max()), self.layout.tp)

    def rank_batch(self, order: Order, step: int, dp_rank: int) -> list[BatchRow]:
        """What one data-parallel rank reads in one step, by micro-batch."""
        layout = self.layout
        if layout.logical_micro_batches:
            return [BatchRow(slots, self.widest) for slots in order.rank_batch(step, layout, dp_rank)]
        slots = order.slots(step, 0, order.global_size)
        room = layout.dp * layout.micro_batches * layout.micro_size
        slots = np.pad(slots, (0, room - len(slots)), constant_values=PADDING)
        slots = slots[np.argsort(-self._sizes(slots), kind="stable")]
        if layout.pp > 1:
            shares = self._spread(slots, np.zeros(layout.dp * layout.micro_batches, np.int64))
            own = shares.reshape(layout.dp, layout.micro_batches, layout.micro_size)[dp_rank]
            return [BatchRow(row, self.widest) for row in own]
        tokens = np.zeros(layout.dp, np.int64)
        blocks = slots.reshape(layout.micro_batches, -1)
        return [BatchRow(self._spread(block, tokens)[dp_rank], self._width(block)) for block in blocks]

    def _sizes(self, slots: Indices) -> Indices:
        return np.where(slots == PADDING, 0, self.lengths[slots])

    def _width(self, block: Indices) -> int:
        unit = _round_up(-(-self.widest // WIDTHS), self.layout.tp)
        return min(_round_up(max(1, int(self._sizes(block[:1])[0])), unit), self.widest)

    def _spread(self, slots: Indices, tokens: Indices) -> Indices:
        """``[shares, slots / shares]``: the next slot goes to the share of the fewest ``tokens``, which are updated."""
        room = len(slots) // len(tokens)
        shares: list[list[int]] = [[] for _ in tokens]
        not_full = [(int(held), share) for share, held in enumerate(tokens)]
        heapify(not_full)
        for slot, size in zip(slots.tolist(), self._sizes(slots).tolist(), strict=True):
            held, share = heappop(not_full)
            shares[share].append(slot)
            tokens[share] = held + size
            if len(shares[share]) < room:
                heappush(not_full, (held + size, share))
        return np.array(shares, np.int64)


def fitted(sample: Sample, width: int) -> Sample:
    """``sample`` with ``width`` tokens: padded with targets that do not count, or cut where none counts.

    Context of as many entries as there are tokens is padded with zeros; the rest stays as it is.

    Raises:
        ValueError: a target that counts would be cut off.
    """
    tokens = len(sample.inputs)
    beyond = sample.targets[width:] if sample.targets.shape[:1] == (tokens,) else sample.targets[:0]
    if (beyond != IGNORED).any():
        raise ValueError(f"it has targets behind the first {width} tokens, and its dataset's lengths say that it ends")

    def fit(value: Array, filler: int) -> Array:
        if value.shape[:1] != (tokens,):
            return value
        missing = max(0, width - tokens)
        return np.pad(value[:width], [(0, missing), *[(0, 0)] * (value.ndim - 1)], constant_values=filler)

    context = {name: fit(value, 0) for name, value in sample.context.items()}
    return Sample(fit(sample.inputs, 0), fit(sample.targets, IGNORED), context)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
