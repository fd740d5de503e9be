"""Batches samples of different lengths so that all ranks get about equally many tokens.

The samples of a global batch are sorted by length. Each micro-batch takes the next longest samples, and the rank with
the fewest tokens so far gets the next one. Samples in a micro-batch are therefore about equally long, there is little
padding, and all ranks compute with the same shape in every micro-batch. In a pipeline all micro-batches have one shape.

A global batch contains the same samples under every layout. The share of a rank is a function of seed and step.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from hpc_train.data.dataset import IGNORED, Array, Indices, Sample
from hpc_train.data.sampler import PADDING, Order
from hpc_train.plan.layout import Layout

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
