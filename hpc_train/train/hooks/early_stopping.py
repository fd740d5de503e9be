"""Ends a run when a metric of its evaluations no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hpc_train.config.evaluation import highest_is_best
from hpc_train.train.hooks import Hook, HookContext


class EarlyStopping(Hook):
    """Ends the run as done after ``patience`` evaluations in a row without an improvement.

    Args:
        monitor: a key of the metrics, such as val_loss.
        patience: the number of evaluations without an improvement, at least 1.
        min_delta: the minimum change that counts as an improvement.
        mode: min if lower values are better, max if higher values are better; auto chooses for built-in metrics.
    """

    def __init__(
        self, monitor: str = "val_loss", patience: int = 3, min_delta: float = 0.0, mode: str = "auto"
    ) -> None:
        self._monitor = monitor
        self._patience = patience
        self._min_delta = min_delta
        self._sign = -1.0 if highest_is_best(monitor, mode, "hooks.early_stopping.args.mode") else 1.0
        self._best: float | None = None
        self._best_step = 0
        self._without = 0  # consecutive evaluations without an improvement

    def evaluation(self, context: HookContext) -> None:
        value = context.metrics.get(self._monitor)
        if value is None:
            metrics = context.metrics.items()
            names = sorted(name for name, other in metrics if name.startswith("val_") and other is not None)
            raise ValueError(f"the evaluation has no metric {self._monitor}; its metrics are {', '.join(names)}")
        if math.isfinite(value) and (self._best is None or self._sign * (self._best - value) > self._min_delta):
            self._best = value
            self._best_step = context.step
            self._without = 0
            return
        self._without += 1
        if self._without >= self._patience:
            best = "was never finite"
            if self._best is not None:
                best = f"was best at step {self._best_step}: {self._best:.6g}"
            context.stop(f"{self._monitor} has not improved in {self._without} evaluations; it {best}")

    def state_dict(self) -> Mapping[str, Any]:
        monitored = {"monitor": self._monitor, "sign": self._sign}
        return {"best": self._best, "best_step": self._best_step, "without": self._without} | monitored

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with the best value, unless it belongs to another metric or mode."""
        if (state.get("monitor", self._monitor), state.get("sign", self._sign)) != (self._monitor, self._sign):
            return
        self._best = state["best"]
        self._best_step = state["best_step"]
        self._without = state["without"]
