"""Computes the sample indices of every rank from the step number, without other state.

The order of an epoch is one global sequence. A step takes the next ``global_size`` positions, and the ranks share
them. A run that resumes with another number of ranks continues the same sequence. The windows of data that a run skips
after a divergence are stored in its checkpoints, so that every resume uses the same order.

The random permutation of an epoch is computed in O(1) memory: a Feistel network is a bijection of b-bit numbers for any
round function, and applying it until the value falls below n ("cycle walking") gives a bijection of [0, n). See Black
and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002).

``StreamOrder`` does the same for the positions of a stream, whose samples have no index (``data.stream``).

``TokenBalance`` batches samples of different lengths so that all ranks get about equally many tokens. It sorts the
samples of a global batch by length. Each micro-batch takes the next longest samples, and the rank with the fewest
tokens so far gets the next one. There is little padding, and all ranks compute with the same shape in every
micro-batch; in a pipeline all micro-batches have one shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from hpc_train.data.dataset import IGNORED, Array, Indices, Sample
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout

PADDING = -1  # marks a slot without a sample


@dataclass(frozen=True)
class Order:
    """Defines the order of ``samples`` samples in global batches of ``global_size``. Raises UserError if there are no
    samples, or too few for one batch with ``drop_last``.

    Attributes:
        drop_last: whether to drop the last batch of an epoch if it is not full; otherwise it is padded.
        seed: the seed of the permutations; None keeps the order of the dataset, as in validation.
    """

    samples: int
    global_size: int
    drop_last: bool
    seed: int | None

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UserError("the dataset has no samples", where="data", fix="use a dataset with samples")
        if self.drop_last and self.samples < self.global_size:
            raise UserError(
                f"{self.samples} samples do not fill one global batch of {self.global_size}",
                where="batch.global_size",
                fix=f"batch.global_size={self.samples} or smaller, batch.drop_last=false, which pads it, or more data",
            )

    @property
    def steps_per_epoch(self) -> int:
        if self.drop_last:
            return self.samples // self.global_size
        return math.ceil(self.samples / self.global_size)

    @property
    def samples_per_epoch(self) -> int:
        """Returns the samples that an epoch uses, without those that ``drop_last`` drops."""
        if self.drop_last:
            return self.steps_per_epoch * self.global_size
        return self.samples

    def epoch_of(self, step: int) -> int:
        return step // self.steps_per_epoch

    def slots(self, step: int, first: int, last: int) -> Indices:
        """Returns the samples at the positions [``first``, ``last``) of the step's global batch.

        Positions beyond the end of the epoch or of the global batch are ``PADDING``.
        """
        within = np.arange(first, last, dtype=np.int64)
        positions = step % self.steps_per_epoch * self.global_size + within
        filled = (within < self.global_size) & (positions < self.samples)
        slots = np.full(last - first, PADDING, dtype=np.int64)
        slots[filled] = self._samples_at(self.epoch_of(step), positions[filled])
        return slots

    def rank_batch(self, step: int, layout: Layout, dp_rank: int) -> Indices:
        """Returns the samples that one data-parallel rank reads in one step.

        Rank r of dp reads the positions [floor(r * G / dp), floor((r + 1) * G / dp)) of the global batch of G samples;
        of V logical micro-batches, v has [floor(v * G / V), floor((v + 1) * G / V)).

        Returns:
            ``[micro_batches, micro_size]`` sample indices in the global order, followed by ``PADDING``.
        """
        if layout.logical_micro_batches:
            rows = np.full((layout.micro_batches, layout.micro_size), PADDING, dtype=np.int64)
            for row, logical in enumerate(layout.logical_of(dp_rank)):
                first = logical * self.global_size // layout.logical_micro_batches
                last = (logical + 1) * self.global_size // layout.logical_micro_batches
                rows[row, : last - first] = self.slots(step, first, last)
            return rows
        first = dp_rank * self.global_size // layout.dp
        last = (dp_rank + 1) * self.global_size // layout.dp
        slots = np.full(layout.micro_batches * layout.micro_size, PADDING, dtype=np.int64)
        if last - first > slots.size:
            raise ValueError(
                f"a rank has {last - first} samples, but the layout has {slots.size} slots for another batch size"
            )
        slots[: last - first] = self.slots(step, first, last)
        return slots.reshape(layout.micro_batches, layout.micro_size)

    def template(self, step: int) -> int:
        """Returns the first sample of the step's global batch, which defines the shape of padding."""
        return int(self.slots(step, 0, 1)[0])

    def _samples_at(self, epoch: int, positions: Indices) -> Indices:
        if self.seed is None:
            return positions
        return Permutation(self.samples, self.seed, epoch)(positions)


@dataclass(frozen=True)
class SpacedOrder(Order):
    """Reads ``samples`` of ``available`` samples, evenly spaced and in the order of the dataset; without a seed."""

    available: int

    def _samples_at(self, epoch: int, positions: Indices) -> Indices:
        return positions * self.available // self.samples


ROUNDS = 12  # even, so that the halves have their first sizes again; small domains need more than a cipher's four
_LEAST_BITS = 6  # halves of two bits are not uniform (chi-square over all orders of 4); halves of three bits are
_MASK_64 = (1 << 64) - 1


def mix(value: int) -> int:
    """Returns the output of splitmix64 (Steele, Lea and Flood 2014) for the 64-bit state ``value``."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


@dataclass(frozen=True)
class Permutation:
    """Permutes [0, ``size``) as a function of ``seed`` and ``epoch``."""

    size: int
    seed: int
    epoch: int

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the elements at ``positions`` in the same shape; raises IndexError if a position is outside [0,
        size)."""
        positions = np.asarray(positions, dtype=np.int64)
        if positions.size == 0:
            return positions.copy()
        if positions.min() < 0 or positions.max() >= self.size:
            raise IndexError(f"positions {positions.min()} to {positions.max()} are not all in [0, {self.size})")
        keys = [np.uint64(mix(mix(mix(self.seed & _MASK_64) ^ self.epoch) ^ number)) for number in range(ROUNDS)]
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


def _mask(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)


def _scramble(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Applies the finalizer of splitmix64 to each element of ``values ^ key``; unsigned arithmetic wraps."""
    values = values ^ key
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@dataclass(frozen=True)
class Skipped:
    """Holds the skipped windows [first, last) of the sequence of global batches, in order and without overlap."""

    windows: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, value: Iterable[Sequence[int]]) -> Skipped:
        return cls(tuple((first, last) for first, last in value))

    def position(self, step: int) -> int:
        """Returns the position of the batch that step ``step`` uses."""
        for first, last in self.windows:
            if step >= first:
                step += last - first
        return step

    def without(self, steps: range) -> Skipped:
        """Returns the windows that also skip the batches of ``steps``."""
        first, last = self.position(steps.start), self.position(steps.stop - 1) + 1
        others = [window for window in self.windows if window[1] <= first or last <= window[0]]
        return Skipped(tuple(sorted([*others, (first, last)])))


@dataclass(frozen=True)
class StreamRequest:
    """Describes one micro-batch of a stream.

    Attributes:
        slots: the positions in the stream; fewer than ``size`` leave room for padding.
        lane: the number of the reader.
        taken: for the last micro-batch of the reader in a step, the positions until the end of the step; else 0.
    """

    slots: tuple[int, ...]
    size: int
    lane: int
    taken: int


@dataclass(frozen=True)
class StreamOrder:
    """Divides the positions of a stream among the readers of all ranks.

    Each rank has ``processes`` readers, a number that divides its number of micro-batches. Reader m modulo
    ``processes`` reads micro-batch m, as a ``DataLoader`` distributes requests.
    """

    global_size: int
    layout: Layout
    dp_rank: int
    processes: int

    @property
    def lanes(self) -> int:
        """Returns the number of readers of all ranks."""
        return self.layout.logical_micro_batches or self.layout.dp * self.processes

    def requests(self, steps: Iterator[int]) -> Iterator[StreamRequest]:
        for step in steps:
            for lane, row, rows in self._rows():
                size = self.layout.micro_size
                begin = step * self.global_size
                of_lane = range(begin + (lane - begin) % self.lanes, begin + self.global_size, self.lanes)
                slots = tuple(of_lane[row * size : (row + 1) * size])
                taken = (step + 1) * self.global_size if row == rows - 1 else 0
                yield StreamRequest(slots, size, lane, taken)

    def _rows(self) -> Iterator[tuple[int, int, int]]:
        """Yields for each micro-batch its reader, its number within the reader, and the reader's micro-batches."""
        if self.layout.logical_micro_batches:  # the same micro-batches under any number of ranks
            for logical in self.layout.logical_of(self.dp_rank):
                yield logical, 0, 1
            return
        rows = self.layout.micro_batches // self.processes
        for number in range(self.layout.micro_batches):
            yield self.dp_rank * self.processes + number % self.processes, number // self.processes, rows


def processes_for(workers: int, layout: Layout) -> int:
    """Returns the largest number of loader processes up to ``workers`` that divides the micro-batches of a rank."""
    return max((count for count in range(1, workers + 1) if layout.micro_batches % count == 0), default=0)


WIDTHS = 8  # the largest number of different widths, since each shape is compiled separately


@dataclass(frozen=True)
class BatchRow:
    """Describes one micro-batch of one rank: samples or ``PADDING``, all with ``width`` tokens."""

    slots: Indices
    width: int


@dataclass(frozen=True)
class TokenBalance:
    """Distributes samples of different lengths over the ranks. ``lengths`` lists the number of tokens of each
    sample."""

    lengths: Indices
    layout: Layout

    @cached_property
    def widest(self) -> int:
        """Returns the tokens of the longest sample, rounded up to a multiple of the ranks that share its tokens."""
        return _round_up(int(self.lengths.max()), self.layout.token_unit)

    def rank_batch(self, order: Order, step: int, dp_rank: int) -> list[BatchRow]:
        layout = self.layout
        if layout.logical_micro_batches:
            return [BatchRow(slots, self.widest) for slots in order.rank_batch(step, layout, dp_rank)]
        slots = order.slots(step, 0, order.global_size)
        room = layout.dp * layout.micro_batches * layout.micro_size
        slots = np.pad(slots, (0, room - len(slots)), constant_values=PADDING)
        slots = slots[np.argsort(-self._sizes(slots), kind="stable")]
        if layout.pp > 1:
            shares = self._spread(slots, np.zeros(layout.dp * layout.micro_batches, np.int64))
            rank_shares = shares.reshape(layout.dp, layout.micro_batches, layout.micro_size)[dp_rank]
            return [BatchRow(row, self.widest) for row in rank_shares]
        tokens = np.zeros(layout.dp, np.int64)
        blocks = slots.reshape(layout.micro_batches, -1)
        return [BatchRow(self._spread(block, tokens)[dp_rank], self._width(block)) for block in blocks]

    def _sizes(self, slots: Indices) -> Indices:
        return np.where(slots == PADDING, 0, self.lengths[slots % len(self.lengths)])  # a mixture numbers its epochs

    def _width(self, block: Indices) -> int:
        unit = _round_up(-(-self.widest // WIDTHS), self.layout.token_unit)
        return min(_round_up(max(1, int(self._sizes(block[:1])[0])), unit), self.widest)

    def _spread(self, slots: Indices, tokens: Indices) -> Indices:
        """Returns ``[shares, slots / shares]``; assigns each slot to the share with the fewest ``tokens`` and updates
        these."""
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


def pad_or_truncate(sample: Sample, width: int) -> Sample:
    """Returns ``sample`` with ``width`` tokens: padded with ``IGNORED`` targets, or truncated where no target counts.

    Context with one entry per token is padded with zeros; other context does not change. Raises ValueError if the
    truncation would remove a target that counts.
    """
    tokens = len(sample.inputs)
    if sample.targets.shape[:1] == (tokens,):
        beyond = sample.targets[width:]
    else:
        beyond = sample.targets[:0]
    if (beyond != IGNORED).any():
        raise ValueError(f"the sample has targets after its first {width} tokens, its length according to the dataset")

    def fit(value: Array, filler: int) -> Array:
        if value.shape[:1] != (tokens,):
            return value
        missing = max(0, width - tokens)
        return np.pad(value[:width], [(0, missing), *[(0, 0)] * (value.ndim - 1)], constant_values=filler)

    context = {name: fit(value, 0) for name, value in sample.context.items()}
    return Sample(fit(sample.inputs, 0), fit(sample.targets, IGNORED), context)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
