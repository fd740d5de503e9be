"""Which sample stands where: from a step to the sample indices of every rank, with no state but the step.

The order of an epoch is one global sequence. A step takes the next ``global_size`` positions of it, however many ranks
there are; the ranks only divide what the step has. A run that goes on with another number of ranks goes on in the same
sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hpc_train.config.errors import ConfigError
from hpc_train.config.layout import Layout
from hpc_train.data.dataset import Indices
from hpc_train.data.permutation import Permutation

PADDING = -1  # a slot without a sample


@dataclass(frozen=True)
class Order:
    """The order of ``samples`` samples in global batches of ``global_size``.

    Attributes:
        drop_last: the samples that do not fill a last batch are left out of the epoch; without it that batch is padded.
        seed: of the permutation of each epoch; None keeps the order of the dataset (validation).

    Raises:
        ConfigError: no samples, or too few for one batch with ``drop_last``.
    """

    samples: int
    global_size: int
    drop_last: bool
    seed: int | None

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigError("the dataset has no samples", where="data", mend="point data at a set with samples")
        if self.drop_last and self.samples < self.global_size:
            raise ConfigError(
                f"{self.samples} samples do not fill one global batch of {self.global_size}",
                where="batch.global_size",
                mend=f"batch.global_size={self.samples} or smaller, batch.drop_last=false (pads it), or more data",
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
