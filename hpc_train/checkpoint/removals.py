"""Decides which checkpoints a run keeps, and removes the others in the background on rank 0, so that no save waits for
their unlinks.

A checkpoint of N ranks has N files, and a metadata server takes about a millisecond for each. The order of the steps
keeps this safe: a checkpoint is first renamed to a hidden name, or loses its marker, and that is synced; only then its
files are unlinked one by one (``CheckpointStore.prune``). A process that dies in between leaves a hidden directory,
which no run loads and which the next removal finishes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hpc_train.config.evaluation import BestMetric


@dataclass(frozen=True)
class Kept:
    """Holds the step and metrics of a complete checkpoint, by which ``removable`` decides."""

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Retention:
    """Defines which checkpoints are kept; one rule that keeps a checkpoint is enough.

    Attributes:
        newest: keep this many of the newest, at least one.
        every: keep the first checkpoint at or after each multiple of this many steps; 0 disables the rule.
        best: keep the best by this metric.
    """

    newest: int = 2
    every: int = 0
    best: BestMetric | None = None


def removable(checkpoints: Sequence[Kept], retention: Retention) -> set[int]:
    """Returns the steps of the checkpoints that ``retention`` does not keep."""
    steps = sorted(checkpoint.step for checkpoint in checkpoints)
    retained = set(steps[-max(1, retention.newest) :])
    if retention.every > 0:
        first: dict[int, int] = {}
        for step in steps:
            first.setdefault(step // retention.every, step)
        retained.update(step for span, step in first.items() if span > 0)
    best = best_step(checkpoints, retention.best)
    if best is not None:
        retained.add(best)
    return set(steps) - retained


def best_step(checkpoints: Sequence[Kept], metric: BestMetric | None) -> int | None:
    """Returns the step with the best ``metric``, the first of equals; None if no checkpoint has it."""
    if metric is None:
        return None
    sign = -1.0 if metric.highest else 1.0
    results = [
        (sign * checkpoint.metrics[metric.name], checkpoint.step)
        for checkpoint in checkpoints
        if metric.name in checkpoint.metrics and math.isfinite(checkpoint.metrics[metric.name])
    ]
    if results:
        return min(results)[1]
    return None


_POLL_S = 0.2


@dataclass
class Removals:
    """Runs removals one after the other in one thread.

    Attributes:
        report: called in that thread with the exception of a removal that failed.
    """

    report: Callable[[Exception], None]
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _due: list[Callable[[], None]] = field(default_factory=list, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    @property
    def busy(self) -> bool:
        return self._thread is not None

    def start(self, removal: Callable[[], None]) -> None:
        """Runs ``removal`` after the ones that are running or due; returns at once. Any thread may call it.

        Each removal looks for all that is to be removed, so the ones that follow a slow one find little to do.
        """
        with self._lock:
            self._due.append(removal)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="remove-checkpoints", daemon=True)
                self._thread.start()

    def wait(self, give_up: Callable[[], bool] = lambda: False) -> None:
        """Waits until all removals are finished or ``give_up`` returns True."""
        while (thread := self._thread) is not None and not give_up():
            thread.join(_POLL_S)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._due:
                    self._thread = None
                    return
                removal = self._due.pop(0)
            try:
                removal()
            except Exception as error:
                self.report(error)
