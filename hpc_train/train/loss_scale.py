"""Dynamic loss scaling for fp16, on the device.

The loss is multiplied by a scale so that small gradients do not vanish in fp16. A step whose gradients overflow is
skipped and halves the scale; ``growth_every`` finite steps in a row double it (Micikevicius et al. 2018,
arXiv:1710.03740). The decision hangs on the global gradient norm, so it is the same on every rank, and the host never
waits for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpc_train.config.schema import PrecisionConfig

GROWTH, BACKOFF = 2.0, 0.5
SMALLEST, LARGEST = 2.0**-14, 2.0**24  # outside, the scale itself would leave fp16's range of use


class LossScale:
    """The scale (a scalar fp32 tensor on ``device``) and the finite steps since it last changed."""

    def __init__(self, config: PrecisionConfig, device: torch.device) -> None:
        self._growth_every = config.loss_scale_growth_every
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
