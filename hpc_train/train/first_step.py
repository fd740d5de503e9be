"""Reports how long the first step of an attempt takes, and keeps the graphs that torch.compile makes in it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from hpc_train.parallel.compile import KeptArtifacts
from hpc_train.train.report import Report
from hpc_train.train.watch.measures import Meter


@dataclass
class FirstStep:
    """Follows the first step of an attempt.

    Attributes:
        artifacts: those of torch.compile; None without it.
        pending: whether the attempt has not completed a step.
    """

    device: torch.device
    meter: Meter
    report: Report
    artifacts: KeptArtifacts | None
    pending: bool = field(default=True, init=False)

    def finish(self, step: int, began: float) -> None:
        """Reports the seconds since ``began`` if the attempt is a restart or compiles, and keeps the graphs.

        Args:
            began: of ``time.monotonic()``.
        """
        self.pending = False
        restarted = self.report.events.attempt > 0 or step > 1
        if self.artifacts is None and not restarted:
            return
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        self.report.first_step(step, time.monotonic() - began, self.artifacts)
        self.keep_artifacts()

    def keep_artifacts(self) -> None:
        """Keeps the graphs that were compiled since the last call; does nothing without torch.compile."""
        if self.artifacts is not None:
            with self.meter.pausing():
                self.artifacts.save()
