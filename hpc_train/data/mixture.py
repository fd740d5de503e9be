"""Mixes several datasets by weights, as a function of seed and position, without other state.

The j-th sample of a source with the share w has its turn at (j + 1/2) / w, and the mixture takes the samples in the
order of their turns: Webster's method of apportionment. The first n samples of the mixture, and each global batch,
therefore have close to n * w samples of each source, and any position can be computed without those before it. Each
source has its own epochs with their own permutations, and a mixture has no end.

In messages and batches a sample has one number: epoch * T + its place in the concatenation of the sources, which have T
samples together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_train.data.dataset import Dataset, Indices, Sample
from hpc_train.data.sampler import PADDING, Order, Permutation, Skipped, mix
from hpc_train.errors import UserError

Shares = NDArray[np.float64]


def shares_of(weights: Sequence[float]) -> Shares:
    return np.array(weights, np.float64) / math.fsum(weights)


def picks(shares: Shares, first: int, last: int) -> tuple[Indices, Indices]:
    """Returns, for the positions [``first``, ``last``) of a mixture, the source and the number of the sample in it."""
    before, sources, numbers = _near(shares, first, last)
    chosen = slice(first - before, last - before)
    return sources[chosen], numbers[chosen]


def counts(shares: Shares, positions: int) -> Indices:
    """Returns how many of the first ``positions`` samples of a mixture each source gives."""
    before, sources, numbers = _near(shares, positions, positions)
    counted = np.zeros(len(shares), np.int64)
    for source in range(len(shares)):
        left = numbers[sources == source]
        counted[source] = int(left.min()) + int((sources[: positions - before] == source).sum())
    return counted


def _near(shares: Shares, first: int, last: int) -> tuple[int, Indices, Indices]:
    """Returns sources and numbers in the order of their turns around [``first``, ``last``), and their first position.

    Until the time t a source has had floor(w * t + 1/2) turns, so all K sources have had between t - K / 2 and
    t + K / 2. The samples with turns until first - K are therefore before ``first``, and so on.
    """
    room = len(shares)
    low = np.maximum(0, np.floor(shares * (first - room)).astype(np.int64) - 1)
    high = np.ceil(shares * (last + room)).astype(np.int64) + 2
    sources = np.repeat(np.arange(room), high - low)
    numbers = np.concatenate([np.arange(begin, end) for begin, end in zip(low, high, strict=True)])
    order = np.lexsort((sources, (numbers + 0.5) / shares[sources]))
    return int(low.sum()), sources[order], numbers[order]


@dataclass(frozen=True)
class MixedOrder(Order):
    """Defines the order of a mixture. ``samples`` is the sum of ``sizes``, which is called an epoch of the mixture.

    Attributes:
        sizes: the number of samples of each source.
        shares: the share of each source, which add up to 1.
    """

    sizes: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()

    @property
    def samples_per_epoch(self) -> int:
        return self.steps_per_epoch * self.global_size

    def slots(self, step: int, first: int, last: int) -> Indices:
        """Returns the samples at the positions of the step's global batch, all of which are filled."""
        slots = np.full(last - first, PADDING, dtype=np.int64)
        begin, end = (step * self.global_size + min(place, self.global_size) for place in (first, last))
        sources, numbers = picks(np.array(self.shares), begin, end)
        for source, size in enumerate(self.sizes):
            positions = np.flatnonzero(sources == source)
            epochs, within = np.divmod(numbers[positions], size)
            for epoch in np.unique(epochs).tolist():
                order = Permutation(size, mix((self.seed or 0) + source), epoch)
                first_slot = epoch * self.samples + sum(self.sizes[:source])
                slots[positions[epochs == epoch]] = first_slot + order(within[epochs == epoch])
        return slots

    def seen(self, steps: int, skipped: Skipped) -> Indices:
        """Returns how many samples of each source the first ``steps`` steps use."""
        total = np.zeros(len(self.sizes), np.int64)
        begin = 0
        end = skipped.position(steps - 1) + 1 if steps else 0
        for first, last in (*skipped.windows, (end, end)):
            shares = np.array(self.shares)
            total += counts(shares, min(first, end) * self.global_size) - counts(shares, begin * self.global_size)
            begin = min(last, end)
        return total


@dataclass(frozen=True)
class SourceSeen:
    """Holds how much of a source was used: samples, their share in the mixture, and epochs of the source."""

    samples: int
    share: float
    epochs: float


class MixtureDataset(Dataset):
    """Holds the sources of a mixture, or their validation samples one source after the other.

    ``weights`` holds the relative weight of each source; if it is empty, the weight is the number of samples. Raises
    UserError if the sources cannot be in one batch, or a source has no samples.
    """

    def __init__(self, sources: Mapping[str, Dataset], weights: Mapping[str, float]) -> None:
        self.sources = dict(sources)
        self.sizes = tuple(len(source) for source in self.sources.values())
        for name, source in self.sources.items():
            if len(source) == 0:
                raise UserError(
                    f"the source {name} has no samples", where=f"data.sources.{name}", fix="a source with samples"
                )
        scales = {name: source.scale for name, source in self.sources.items()}
        if len(set(scales.values())) > 1:
            raise UserError(
                "the sources normalize pixels differently: "
                + ", ".join(f"{name} by {scale}" for name, scale in scales.items()),
                where="data.sources",
                fix="sources of one kind, or data.sources.NAME=custom with a dataset that returns float pixels",
            )
        self.shares = shares_of([weights[name] for name in self.sources] if weights else self.sizes)
        self._ends = np.cumsum(self.sizes)
        first = next(iter(self.sources.values()))
        self.scale = first.scale
        self.notice = "; ".join(source.notice for source in self.sources.values() if source.notice)
        self.shared_file = next((source.shared_file for source in self.sources.values() if source.shared_file), "")
        self.loads_cheaply = all(source.loads_cheaply for source in self.sources.values())
        if any(source.lengths is not None for source in self.sources.values()):
            self.lengths = np.concatenate([_lengths(source) for source in self.sources.values()])

    def __len__(self) -> int:
        return int(self._ends[-1])

    @cached_property
    def identity(self) -> dict[str, Any]:
        return {"samples": len(self), "sources": {name: source.identity for name, source in self.sources.items()}}

    def order(self, global_size: int, drop_last: bool, seed: int) -> MixedOrder:
        return MixedOrder(len(self), global_size, drop_last, seed, self.sizes, tuple(self.shares.tolist()))

    def seen(self, order: MixedOrder, steps: int, skipped: Skipped) -> dict[str, SourceSeen]:
        counts = order.seen(steps, skipped).tolist()
        return {
            name: SourceSeen(samples, samples / max(1, sum(counts)), samples / size)
            for name, size, samples in zip(self.sources, self.sizes, counts, strict=True)
        }

    def sample(self, index: int, epoch: int) -> Sample:
        _, source, within, source_epoch = self._place(index)
        return source.sample(within, source_epoch)

    def prefetch(self, index: int) -> None:
        _, source, within, _ = self._place(index)
        source.prefetch(within)

    def item(self, index: int, epoch: int) -> Any:
        _, source, within, source_epoch = self._place(index)
        return source.item(within, source_epoch)

    def source(self, index: int) -> str:
        _, source, within, _ = self._place(index)
        return source.source(within)

    def describe(self, index: int) -> str:
        name, source, within, _ = self._place(index)
        return f"{source.describe(within)} of the source {name}"

    def _place(self, index: int) -> tuple[str, Dataset, int, int]:
        """Returns the name, the source, the index in the source and the epoch of the source."""
        epoch, place = divmod(index, len(self))
        number = int(np.searchsorted(self._ends, place, side="right"))
        name = list(self.sources)[number]
        return name, self.sources[name], place - int(self._ends[number]) + self.sizes[number], epoch


def _lengths(source: Dataset) -> Indices:
    if source.lengths is not None:
        return np.asarray(source.lengths)
    return np.full(len(source), len(source.sample(0, 0).inputs), np.int64)
