"""Metrics of your own: a mean as a function, and any other function of sums as a class.

    python -m hpc_train +strategy=dp +metrics.calibration._target_=examples.own_metric.Calibration \
        +metrics.confidence._target_=examples.own_metric.confidence

Each evaluation then has ``val_confidence`` and ``val_calibration``, over every sample of the validation set once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpc_train.metrics import Metric

PADDING = -100


def confidence(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum of the highest probabilities and their number; hpc_train divides the sums over all ranks."""
    highest = outputs[targets != PADDING].softmax(-1).amax(-1)
    return highest.sum(), torch.tensor(highest.numel())


class Calibration(Metric):
    """The expected calibration error: how far the confidence of predictions is from their accuracy, in bins.

    Args:
        bins: the number of bins of the confidence.
    """

    def __init__(self, bins: int = 10) -> None:
        self.bins = bins

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns per bin the number of predictions, their confidence, and how many are right: ``[3 x bins]``."""
        kept = targets != PADDING
        highest, predicted = outputs[kept].softmax(-1).max(-1)
        bins = (highest * self.bins).long().clamp(max=self.bins - 1)
        columns = (torch.ones_like(highest), highest, (predicted == targets[kept]).to(highest))
        return torch.cat([highest.new_zeros(self.bins).index_add(0, bins, column) for column in columns])

    def value(self, sums: Tensor) -> float:
        number, confident, right = sums.view(3, self.bins)
        return float((confident - right).abs().sum() / number.sum())
