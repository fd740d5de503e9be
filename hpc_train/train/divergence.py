"""Whether a run still learns: told from what is logged anyway, so it costs nothing, and the same on every rank.

It has diverged when the last ``train.nonfinite_limit`` steps were all skipped, or, where ``train.spike_mads`` is set,
when three logged losses in a row lie that many median absolute deviations above the median of those before. Both are
robust against the single batch that a run gets over by itself. Going back and passing over the samples is what helped
PaLM (Chowdhery et al. 2022, arXiv:2204.02311, section 5.1).

A run may end before that is noticed, so it is looked at once more at its end (``at_end``).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from hpc_train.config.schema import TrainConfig

WINDOW, LEAST = 64, 16  # logged losses that are compared with: at most, at least
IN_A_ROW = 3  # logged losses above; at the end, steps that were skipped


@dataclass(frozen=True)
class Divergence:
    """``since``: steps done before the first that may be bad. A ``fatal`` one does not pass by itself."""

    since: int
    reason: str
    fatal: bool


class DivergenceWatch:
    """Looks at every logged step."""

    def __init__(self, config: TrainConfig) -> None:
        self._limit, self._mads = config.nonfinite_limit, config.spike_mads
        self.max_rollbacks = config.max_rollbacks
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._high = 0  # losses in a row
        self._calm_at = 0  # the last logged step before them
        self._finite_at = 0  # the last logged step with a finite loss and a finite gradient

    @property
    def calm(self) -> bool:
        """No loss was too high since the last one that was not."""
        return self._high == 0

    def look(self, step: int, loss: float, skipped: int) -> Divergence | None:
        """After ``step`` steps, of which the last ``skipped`` had no finite gradient. Forgets what it has told."""
        if skipped >= self._limit:
            reason = (
                f"no gradient was finite in the last {skipped} steps: the training has diverged; a smaller optim.lr, "
                "more optim.warmup_steps, or precision=bf16 instead of fp16"
            )
            return Divergence(step - skipped, reason, fatal=True)
        if skipped or not math.isfinite(loss):
            return None
        self._finite_at = step
        if not self._is_spike(loss):
            self._losses.append(loss)
            self._high, self._calm_at = 0, step
            return None
        self._high += 1
        if self._high < IN_A_ROW:
            return None
        reason = f"the loss jumped after step {self._calm_at}, from {median(self._losses):.4g} to {loss:.4g}"
        self._losses.clear()
        self._high = 0
        return Divergence(self._calm_at, reason, fatal=False)

    def at_end(self, step: int, loss: float, validation: float, skipped: int, scaled: bool) -> Divergence | None:
        """After the last step of the run and ``look``. A single bad step at the very end is no divergence where the
        validation loss shows that the weights are good.

        Args:
            validation: the loss of the final evaluation.
            scaled: fp16's loss scale follows each step that is skipped, so a finite loss tells more than they do.

        Returns:
            ``fatal`` where the weights are not worth keeping: training itself has come to nothing.
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

    def _is_spike(self, loss: float) -> bool:
        if self._mads == 0 or len(self._losses) < LEAST:
            return False
        middle = median(self._losses)
        spread = median(abs(value - middle) for value in self._losses)
        return loss > middle + self._mads * max(spread, 1e-3 * abs(middle))  # losses may be all but equal

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {
            "losses": list(self._losses),
            "high": self._high,
            "calm_at": self._calm_at,
            "finite_at": self._finite_at,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._losses = deque(state["losses"], maxlen=WINDOW)
        self._high, self._calm_at = state["high"], state["calm_at"]
        self._finite_at = state.get("finite_at", 0)
