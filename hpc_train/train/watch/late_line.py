"""Logs the metrics of a step on a GPU one step later, so that the device never waits for the host.

The few scalars of the step are copied to page-locked memory, and an event marks the end of the copy. The host reads
them when it has already launched the next step. A save, an evaluation, a stop and the end of the run read them first;
hence every checkpoint includes what its line has changed, and after a failure no line is missing below the checkpoint.
A divergence is found one step later, but the step taken meanwhile counts as not taken: the data that is skipped and the
numbers are those of a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpc_train.parallel.engine import step_numbers
from hpc_train.train.step import SkippedSteps

SUMS = ("loss_sum", "target_count", "correct_sum", "reports")
SKIPPED = ("in_a_row", "since_last")


def logs_late(device: torch.device) -> bool:
    """Returns whether the line of metrics of a step is completed after the next step was launched."""
    return device.type == "cuda"


class Readback:
    """Holds scalars that are being copied from ``device``; later changes of the tensors do not affect them.

    Args:
        values: scalar tensors on ``device``; fp64 represents all of them exactly.
    """

    def __init__(self, values: Mapping[str, Tensor], device: torch.device) -> None:
        self._names = tuple(values)
        together = torch.stack([value.detach().to(torch.float64) for value in values.values()])
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._values = torch.empty(len(values), dtype=torch.float64, pin_memory=True)
            self._values.copy_(together, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._values = together

    @property
    def ready(self) -> bool:
        """Returns whether ``read`` would not wait."""
        return self._copied is None or self._copied.query()

    def read(self) -> dict[str, float]:
        """Returns name -> value; waits for the copy."""
        if self._copied is not None:
            self._copied.synchronize()
        return dict(zip(self._names, self._values.tolist(), strict=True))


@dataclass(frozen=True)
class Line:
    """Holds a line of metrics whose numbers are still being computed.

    Attributes:
        totals: the samples and tokens of the run.
        scalars: the arguments of ``step_numbers``, ``grad_norm``, those of ``SkippedSteps`` and perhaps ``loss_scale``.
    """

    step: int
    epoch: int
    learning_rate: float
    totals: dict[str, int]
    scalars: Readback

    def content(self) -> tuple[dict[str, Any], SkippedSteps]:
        """Returns the metrics that the step itself has computed; waits for the device."""
        values = self.scalars.read()
        metrics = {
            "step": self.step,
            "epoch": self.epoch,
            "loss": step_numbers(*(values[name] for name in SUMS)).loss,
            "lr": self.learning_rate,
            "grad_norm": values["grad_norm"],
            **self.totals,
        }
        metrics |= {name: values[name] for name in ("loss_scale",) if name in values}
        return metrics, SkippedSteps(*(int(values[name]) for name in SKIPPED))
