"""One training step: forward and backward, clipping, update. The host reads nothing back from the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hpc_train.config.schema import Config
from hpc_train.data.batch import StepBatch
from hpc_train.parallel.engine import Engine, StepResult
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.random_streams import seed_step
from hpc_train.train.learning_rate import peak_rate, rate
from hpc_train.train.loss_scale import LossScale
from hpc_train.train.optimizer import Optimizer

MOST_SKIPPED = (
    50  # steps in a row without a finite gradient until a run fails: fp16 needs about 20 from its first scale
)


@dataclass(frozen=True)
class StepOutcome:
    """What one step did; tensors are scalars on the device."""

    result: StepResult
    grad_norm: Tensor  # before clipping; the same on every rank
    learning_rate: float


class TrainStep:
    """Takes ``engine`` and ``optimizer`` through the steps of a run of ``total_steps``.

    Attributes:
        loss_scale: with precision fp16, else None.
    """

    def __init__(self, config: Config, mesh: Mesh, engine: Engine, optimizer: Optimizer, total_steps: int) -> None:
        self._config, self._mesh, self._engine, self._optimizer = config, mesh, engine, optimizer
        self._total_steps = total_steps
        self._peak = peak_rate(config.optim, config.batch.global_size)
        self._skipped = torch.zeros((), dtype=torch.int64, device=mesh.device)  # in a row
        self.loss_scale = LossScale(config.precision, mesh.device) if config.precision.name == "fp16" else None

    def __call__(self, step: int, batch: StepBatch) -> StepOutcome:
        """Runs step ``step`` in [0, total_steps). Parameters stay as they are where a gradient is not finite."""
        seed_step(self._config.train.seed, step, self._mesh)
        scale = None if self.loss_scale is None else self.loss_scale.value
        result = self._engine.train_step(step, batch, scale)
        norm = self._engine.clip_grad_norm_(self._config.optim.clip_norm, scale)
        finite = norm.isfinite()
        learning_rate = rate(self._config.optim, self._peak, step, self._total_steps)
        self._optimizer.step(learning_rate, finite)
        if self.loss_scale is not None:
            self.loss_scale.update(finite)
        self._skipped = torch.where(finite, 0, self._skipped + 1)
        return StepOutcome(result, norm, learning_rate)

    def check_finite(self) -> int:
        """The number of steps in a row, up to now, that were skipped. Waits for the device.

        Raises:
            FloatingPointError: they are so many that nothing is learnt any more; on every rank.
        """
        skipped = int(self._skipped.item())
        if skipped >= MOST_SKIPPED:
            raise FloatingPointError(
                f"no gradient was finite in the last {skipped} steps: the training has diverged; a smaller optim.lr, "
                "more optim.warmup_steps, or precision=bf16 instead of fp16"
            )
        return skipped
