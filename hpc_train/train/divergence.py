"""Detects divergence from the logged values, which are the same on every rank.

A run has diverged when its last ``train.nonfinite_limit`` steps were all skipped, or, with ``train.spike_mads``, when
three consecutive logged losses exceed the median of the earlier ones by that many median absolute deviations. A single
bad batch triggers neither rule. Rolling back and skipping the data follows PaLM (Chowdhery et al. 2022,
arXiv:2204.02311, section 5.1). ``at_end`` repeats the check at the end of the run with fewer steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from hpc_train.config.schema import TrainConfig

WINDOW, LEAST = 64, 16  # largest and smallest number of logged losses for the median
IN_A_ROW = 3  # consecutive high losses, or skipped steps at the end of the run


NO_LOSS = (
    "the loss of the first step is exactly 0, so nothing is learnt: all targets may be ignored, or the loss may not "
    "fit the model, as the cross-entropy of a single class, which is always 0"
)


@dataclass(frozen=True)
class Divergence:
    """Describes a divergence.

    Attributes:
        since: number of steps before the first one that may be bad.
        fatal: whether training cannot continue without a rollback.
    """

    since: int
    reason: str
    fatal: bool


class DivergenceWatch:
    """Checks every logged step for divergence."""

    def __init__(self, config: TrainConfig, precision: str = "fp32") -> None:
        self._is_fp16 = precision == "fp16"
        self._limit = config.nonfinite_limit
        self._mads = config.spike_mads
        self.max_rollbacks = config.max_rollbacks
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._high = 0  # consecutive high losses
        self._calm_at = 0  # the last logged step without a high loss
        self._finite_at = 0  # the last logged step with a finite loss and a finite gradient

    @property
    def calm(self) -> bool:
        """Returns whether the last logged loss was not a spike."""
        return self._high == 0

    def check(self, step: int, loss: float, skipped: int) -> Divergence | None:
        """Returns a divergence after ``step`` steps, the last ``skipped`` of them skipped; reports each one once."""
        if skipped >= self._limit:
            reason = (
                f"no gradient was finite in the last {skipped} steps: the training has diverged; try a smaller "
                "optim.lr or more optim.warmup_steps"
            )
            if self._is_fp16:
                reason += ", or precision=bf16"
            return Divergence(step - skipped, reason, fatal=True)
        if skipped or not math.isfinite(loss):
            return None
        self._finite_at = step
        is_spike = False
        if self._mads > 0 and len(self._losses) >= LEAST:
            middle = median(self._losses)
            spread = median(abs(value - middle) for value in self._losses)
            is_spike = loss > middle + self._mads * max(spread, 1e-3 * abs(middle))  # the losses may be almost equal
        if not is_spike:
            self._losses.append(loss)
            self._high = 0
            self._calm_at = step
            return None
        self._high += 1
        if self._high < IN_A_ROW:
            return None
        reason = f"the loss jumped after step {self._calm_at}, from {median(self._losses):.4g} to {loss:.4g}"
        self._losses.clear()
        self._high = 0
        return Divergence(self._calm_at, reason, fatal=False)

    def at_end(self, step: int, loss: float, validation: float, skipped: int, scaled: bool) -> Divergence | None:
        """Checks the end of the run, after ``check``. A single bad last step with a finite validation loss is accepted.

        Args:
            validation: the loss of the final evaluation.
            scaled: whether fp16's loss scaling is in use, where skipped steps alone do not prove divergence.

        Returns:
            None, or a divergence, which is ``fatal`` if the weights are not worth saving.
        """
        last = f"the last logged step with a finite loss and gradient is step {self._finite_at}"
        if not math.isfinite(loss) and (skipped > 1 or not math.isfinite(validation)):
            reason = f"the run has diverged: the loss of its last step, {step}, is not finite; {last}"
            return Divergence(self._finite_at, reason, fatal=True)
        if skipped >= IN_A_ROW and not scaled:
            reason = f"the run has diverged: no gradient was finite in its last {skipped} steps; {last}"
            return Divergence(self._finite_at, reason, fatal=True)
        if not math.isfinite(validation):
            reason = f"the validation loss after the last step, {step}, is not finite; the training loss is {loss:.4g}"
            return Divergence(step, reason, fatal=False)
        return None

    def state(self) -> dict[str, Any]:
        """Returns the state to save in a checkpoint."""
        return {
            "losses": list(self._losses),
            "high": self._high,
            "calm_at": self._calm_at,
            "finite_at": self._finite_at,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._losses = deque(state["losses"], maxlen=WINDOW)
        self._high = state["high"]
        self._calm_at = state["calm_at"]
        self._finite_at = state.get("finite_at", 0)
