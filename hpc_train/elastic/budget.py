"""``run.max_gpu_hours``: a run at work that has used them up is asked to stop, saves, and is not started again."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from hpc_train.config.schema import Config
from hpc_train.run.directory import RunDirectory
from hpc_train.run.ledger import read_ledger

OVER_BUDGET = "run.max_gpu_hours"  # takes the place of a signal
LEAST_S, MOST_S = 1.0, 24 * 3600.0  # between two looks at the ledger


@dataclass
class Budget:
    """Of a job that holds ``gpus``."""

    run: RunDirectory
    most: float | None
    gpus: int
    _next: float = field(default=0.0, init=False)  # not before can it be used up; on the monotonic clock

    def hold(self, gpus: int) -> None:
        """The job holds so many from now on."""
        if gpus != self.gpus:
            self.gpus, self._next = gpus, 0.0

    @property
    def is_used_up(self) -> bool:
        """Asked a few times per second."""
        now = time.monotonic()
        if self.most is None or now < self._next:
            return False
        left = self.most - used(self.run)
        self._next = now + min(max(LEAST_S, left * 3600 / max(1, self.gpus)), MOST_S)
        return left <= 0


def over_budget(run: RunDirectory, config: Config) -> str | None:
    """Words for a run that has used up its GPU-hours; None where it may go on."""
    most = config.run.max_gpu_hours
    if most is None or (so_far := used(run)) < most:
        return None
    return f"it has used {so_far:.1f} GPU-hours (run.max_gpu_hours={most:g})"


def used(run: RunDirectory) -> float:
    """GPU-hours, over all jobs of the run."""
    return read_ledger(run, time.time()).total.gpu_hours
