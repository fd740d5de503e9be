"""Computes the length of a run from the config and the size of the training set."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpc_train.config.schema import Config
from hpc_train.data.feed import TrainFeed


@dataclass(frozen=True)
class Length:
    """Holds the length of a run and of its epochs.

    Attributes:
        samples_per_epoch: samples that an epoch uses, without those that ``batch.drop_last`` drops.
    """

    total_steps: int
    steps_per_epoch: int
    global_size: int
    samples_per_epoch: int

    def samples(self, steps: int) -> int:
        """Returns the number of samples in the first ``steps`` steps, without padding."""
        epochs, rest = divmod(steps, self.steps_per_epoch)
        return epochs * self.samples_per_epoch + min(self.samples_per_epoch, rest * self.global_size)


def run_length(config: Config, feed: TrainFeed) -> Length:
    """Returns the length of the run of ``config``. A stream is one epoch."""
    steps, epochs, size = config.train.steps, config.train.epochs, config.batch.global_size
    if feed.steps_per_epoch is None or feed.samples_per_epoch is None:
        assert steps is not None
        return Length(steps, max(1, steps), size, max(1, steps) * size)
    total = steps if steps is not None else math.ceil((epochs or 0.0) * feed.steps_per_epoch)
    return Length(total, feed.steps_per_epoch, size, feed.samples_per_epoch)
