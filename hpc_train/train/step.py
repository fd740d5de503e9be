"""One training step: forward and backward, clipping, update. The host reads nothing back from the device.

Dynamic loss scaling for fp16, on the device.

The loss is multiplied by a scale so that small gradients do not vanish in fp16. A step whose gradients overflow is
skipped and halves the scale; ``growth_every`` finite steps in a row double it (Micikevicius et al. 2018,
arXiv:1710.03740). The decision hangs on the global gradient norm, so it is the same on every rank, and the host never
waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpc_train.config.schema import Config, PrecisionConfig
from hpc_train.data.dataset import StepBatch
from hpc_train.parallel.engine import Engine, StepResult, seed_step
from hpc_train.parallel.mesh import Mesh
from hpc_train.train.learning_rate import peak_rate, rate
from hpc_train.train.optimizer import Optimizer


@dataclass(frozen=True)
class StepOutcome:
    """What one step did; tensors are scalars on the device."""

    result: StepResult
    grad_norm: Tensor  # before clipping; the same on every rank
    learning_rate: float


@dataclass(frozen=True)
class SkippedSteps:
    """Steps without an update, as their gradients were not finite."""

    in_a_row: int  # up to now
    since_last: int  # since the last time that somebody asked


class TrainStep:
    """Takes ``engine`` and ``optimizer`` through the steps of a run of ``total_steps``.

    Attributes:
        optimizer: of the engine's parameters.
        loss_scale: with precision fp16, else None.
    """

    def __init__(self, config: Config, mesh: Mesh, engine: Engine, optimizer: Optimizer, total_steps: int) -> None:
        self._config, self._mesh, self._engine, self.optimizer = config, mesh, engine, optimizer
        self._total_steps = total_steps
        self._peak = peak_rate(config.optim, config.batch.global_size)
        self._skipped = torch.zeros(2, dtype=torch.int64, device=mesh.device)  # in a row, since the last look
        self.loss_scale = LossScale(config.precision, mesh.device) if config.precision.name == "fp16" else None

    def __call__(self, step: int, batch: StepBatch) -> StepOutcome:
        """Runs step ``step`` in [0, total_steps). Parameters stay as they are where a gradient is not finite."""
        seed_step(self._config.train.seed, step, self._mesh)
        scale = None if self.loss_scale is None else self.loss_scale.value
        result = self._engine.train_step(step, batch, scale)
        norm = self._engine.clip_grad_norm_(self._config.optim.clip_norm, scale)
        finite = norm.isfinite()
        self._engine.commit(finite)
        learning_rate = rate(self._config.optim, self._peak, step, self._total_steps)
        self.optimizer.step(learning_rate, finite)
        if self.loss_scale is not None:
            self.loss_scale.update(finite)
        self._skipped[0] = torch.where(finite, 0, self._skipped[0] + 1)
        self._skipped[1] += ~finite
        return StepOutcome(result, norm, learning_rate)

    def skipped(self) -> SkippedSteps:
        """Counts anew. Waits for the device."""
        found = SkippedSteps(*self._skipped.tolist())
        self._skipped[1] = 0
        return found

    @property
    def skipped_in_a_row(self) -> int:
        """Up to now. Waits for the device."""
        return int(self._skipped[0].item())

    def state(self) -> dict[str, Any]:
        """For the checkpoint; waits for the device."""
        scale = self.loss_scale
        return {"loss_scale": None if scale is None else scale.state(), "skipped_steps": self.skipped_in_a_row}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """``state`` may be of an older version or of another precision."""
        if self.loss_scale is not None and state["loss_scale"] is not None:
            self.loss_scale.load_state(state["loss_scale"])
        self._skipped[0], self._skipped[1] = state.get("skipped_steps", 0), 0


GROWTH, BACKOFF = 2.0, 0.5
SMALLEST, LARGEST = 2.0**-14, 2.0**24  # outside, the scale itself would leave fp16's range of use


class LossScale:
    """The scale (a scalar fp32 tensor on ``device``) and the finite steps since it last changed."""

    def __init__(self, config: PrecisionConfig, device: torch.device) -> None:
        self._growth_every = config.loss_scale_growth_interval
        self.value = torch.tensor(config.loss_scale_init, dtype=torch.float32, device=device)
        self._finite_steps = torch.zeros((), dtype=torch.int64, device=device)

    def update(self, finite: Tensor) -> None:
        """After a step. ``finite``: scalar bool on the device, the same on every rank."""
        counted = torch.where(finite, self._finite_steps + 1, 0)
        grows = counted >= self._growth_every
        factor = torch.where(finite, torch.where(grows, GROWTH, 1.0), BACKOFF)
        self.value = (self.value * factor).clamp(SMALLEST, LARGEST)
        self._finite_steps = torch.where(grows, 0, counted)

    def state(self) -> dict[str, Any]:
        """For the checkpoint; waits for the device."""
        return {"scale": self.value.item(), "finite_steps": int(self._finite_steps.item())}

    def load_state(self, state: dict[str, Any]) -> None:
        self.value.fill_(state["scale"])
        self._finite_steps.fill_(state["finite_steps"])
