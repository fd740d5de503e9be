"""The interface of a metric of evaluations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor


class Metric(ABC):
    """A metric that is a function of sums over samples. A subclass needs no attributes besides its arguments."""

    @abstractmethod
    def sums(self, outputs: Any, targets: Tensor) -> Tensor | Sequence[Tensor | float]:
        """Returns the sums of one micro-batch: a tensor, or several numbers, of the same size in every call.

        Args:
            outputs: what the model's loss gets: logits with the classes in the last dim, or the outputs of your own
                module.
            targets: the targets of the loss. Those that are -100 are padding and must not contribute.
        """

    @abstractmethod
    def value(self, sums: Tensor) -> float | Mapping[str, float]:
        """Returns the metric from the sums over all samples, a 1-dimensional fp64 tensor on the CPU; a mapping gives
        several values, whose keys are appended to the name."""


class Mean(Metric):
    """Computes the mean of a function that returns ``(sum, count)``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def sums(self, outputs: Any, targets: Tensor) -> Tensor | Sequence[Tensor | float]:
        found: Tensor | Sequence[Tensor | float] = self._function(outputs, targets)
        return found

    def value(self, sums: Tensor) -> float:
        if sums.numel() != 2:
            raise ValueError(f"the function returned {sums.numel()} numbers, not a sum and a count")
        return float(sums[0] / sums[1]) if sums[1] else float("nan")
