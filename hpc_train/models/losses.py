"""Losses as sums, with the number of targets that count: the mean is taken once, over the global batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hpc_train.data.batch import IGNORED


def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the negative log-likelihoods in nats, and the number of targets that are not ``IGNORED`` (int64).

    Args:
        logits: ``[..., classes]``; half precision is widened to float32 first.
        targets: ``[...]`` int64.
    """
    flat = _widened(logits).flatten(0, -2)
    loss = F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, (targets != IGNORED).sum()


def squared_error(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of squared differences over the elements whose target is not ``IGNORED``, and their number (int64).

    Args:
        outputs: same shape as ``targets``.
        targets: any number format; taken in the format of ``outputs`` (at least float32).
    """
    wide = _widened(outputs)
    counts = targets != IGNORED
    difference = torch.where(counts, wide - targets.to(wide.dtype), 0.0)
    return difference.square().sum(), counts.sum()


def count_correct(logits: Tensor, targets: Tensor) -> Tensor:
    """Number of targets (int64) that are the largest of their ``logits`` ``[..., classes]``; ignored ones are not."""
    return (logits.argmax(dim=-1) == targets).sum()


def _widened(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
