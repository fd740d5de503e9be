"""Defines the built-in metrics of classification: of images, sequences, or tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hpc_train.data.dataset import IGNORED
from hpc_train.train.metrics import Metric


def kept(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the logits ``[n, classes]`` and targets ``[n]`` that count.

    Args:
        outputs: logits ``[..., classes]``, or ``[micro, classes, ...]`` if only that shape fits the targets.
        targets: ``[...]`` int64; ``IGNORED`` means no target.

    Raises:
        ValueError: the shapes do not fit.
    """
    if outputs.shape[:-1] != targets.shape:
        if outputs.shape[:1] + outputs.shape[2:] != targets.shape:
            raise ValueError(f"outputs of shape {[*outputs.shape]} are not logits for targets of {[*targets.shape]}")
        outputs = outputs.movedim(1, -1)
    counts = targets != IGNORED
    return outputs[counts], targets[counts]


class Accuracy(Metric):
    """Computes the share of targets that the largest logit predicts."""

    def sums(self, outputs: Tensor, targets: Tensor) -> Sequence[Tensor | float]:
        logits, labels = kept(outputs, targets)
        return (logits.argmax(dim=-1) == labels).sum(), labels.numel()

    def value(self, sums: Tensor) -> float:
        return _ratio(sums[0], sums[1])


class TopK(Metric):
    """Computes the share of targets among the ``k`` largest logits."""

    def __init__(self, k: int = 5) -> None:
        self._k = k

    def sums(self, outputs: Tensor, targets: Tensor) -> Sequence[Tensor | float]:
        logits, labels = kept(outputs, targets)
        largest = logits.topk(min(self._k, logits.shape[-1]), dim=-1).indices
        return (largest == labels[:, None]).sum(), labels.numel()

    def value(self, sums: Tensor) -> float:
        return _ratio(sums[0], sums[1])


class Perplexity(Metric):
    """Computes exp of the mean cross-entropy in nats; half-precision logits are converted to float32 first."""

    def sums(self, outputs: Tensor, targets: Tensor) -> Sequence[Tensor | float]:
        logits, labels = kept(outputs, targets)
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        return F.cross_entropy(logits, labels, reduction="sum"), labels.numel()

    def value(self, sums: Tensor) -> float:
        return float((sums[0] / sums[1]).exp()) if sums[1] else math.nan


class _ClassCounts(Metric):
    """Counts, for each class, the correctly predicted targets, the predictions, and the targets."""

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits, labels = kept(outputs, targets)
        classes = logits.shape[-1]
        predicted = logits.argmax(dim=-1)
        counted = (labels[predicted == labels], predicted, labels)
        return torch.stack([torch.bincount(group, minlength=classes) for group in counted])


class F1(_ClassCounts):
    """Computes the F1 score: 2 TP / (2 TP + FP + FN).

    Args:
        average: macro is the mean over the classes that are predicted or are a target; micro counts all classes
            together.
    """

    def __init__(self, average: str = "macro") -> None:
        if average not in ("macro", "micro"):
            raise ValueError(f"average is {average!r}, not macro or micro")
        self._average = average

    def value(self, sums: Tensor) -> float:
        right, predicted, actual = sums.view(3, -1)
        if self._average == "micro":
            return _ratio(2 * right.sum(), (predicted + actual).sum())
        return _mean_ratio(2 * right, predicted + actual)


class MeanIoU(_ClassCounts):
    """Computes the mean of TP / (TP + FP + FN), the intersection over union, over the classes that occur."""

    def value(self, sums: Tensor) -> float:
        right, predicted, actual = sums.view(3, -1)
        return _mean_ratio(right, predicted + actual - right)


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part / whole) if whole else math.nan


def _mean_ratio(part: Tensor, whole: Tensor) -> float:
    present = whole > 0
    return float((part[present] / whole[present]).mean()) if present.any() else math.nan
