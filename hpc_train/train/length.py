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


def run_length(config: Config, feed: TrainFeed, samples: int) -> Length:
    """Returns the length of the run of ``config``.

    Args:
        samples: the number of samples of the training set.
    """
    steps, epochs = config.train.steps, config.train.epochs
    total = steps if steps is not None else math.ceil((epochs or 0.0) * feed.steps_per_epoch)
    size = config.batch.global_size
    used = feed.steps_per_epoch * size if config.batch.drop_last else samples
    return Length(total, feed.steps_per_epoch, size, used)
