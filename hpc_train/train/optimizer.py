"""AdamW and SGD over the local shards of the parameters, gated by a flag that stays on the device.

Both are elementwise, so each rank updates the shards that it holds as plain tensors: one fused kernel per group under
every strategy, without DTensor's dispatch. Where the gradient norm is not finite the fused kernels leave parameters and
state as they are (``found_inf``, the protocol of ``torch.amp.GradScaler``), and the host is not asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_train.config.errors import ConfigError
from hpc_train.config.schema import OptimConfig


@dataclass(frozen=True)
class _Held:
    """A parameter and what the optimizer updates: itself, or for a DTensor its local shard."""

    parameter: nn.Parameter
    local: nn.Parameter

    def refresh(self) -> None:
        """FSDP2 may exchange the memory of a shard when it first runs, and makes a new gradient in each step."""
        if self.local is not self.parameter:
            gradient = self.parameter.grad
            self.local.data = _local(self.parameter)
            self.local.grad = None if gradient is None else _local(gradient)


class Optimizer:
    """Updates ``parameters`` (canonical name -> parameter of this rank).

    Weight decay applies to parameters with two or more dims: not to biases and the gains of norms. All state exists
    from the beginning, so that a checkpoint can be loaded into it before the first step.
    """

    def __init__(self, config: OptimConfig, parameters: Mapping[str, nn.Parameter]) -> None:
        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self._held = {name: _hold(parameter) for name, parameter in trained.items()}
        groups = []
        for decay in (True, False):
            members = [held.local for held in self._held.values() if (held.parameter.ndim >= 2) == decay]
            if members:
                groups.append({"params": members, "weight_decay": config.weight_decay if decay else 0.0})
        self._inner = _build(config, groups)
        self._named: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}  # the optimizer's own, and as a parameter
        for held in self._held.values():
            self._inner.state[held.local] = _initial_state(self._inner, held.local)

    @torch.no_grad()
    def step(self, learning_rate: float, finite: Tensor) -> None:
        """One update from the parameters' ``.grad``; none where ``finite`` (a scalar bool on the device) is false."""
        for held in self._held.values():
            held.refresh()
        for group in self._inner.param_groups:
            group["lr"] = learning_rate
        self._inner.found_inf = (~finite).to(torch.float32)  # type: ignore[attr-defined]
        self._inner.step()

    def named_state(self) -> dict[str, dict[str, Tensor]]:
        """Canonical name -> key -> tensor, sharing memory with the optimizer; sharded like the parameter."""
        return {
            name: {key: self._shared(name, key, value) for key, value in self._inner.state[held.local].items()}
            for name, held in self._held.items()
        }

    def _shared(self, name: str, key: str, value: Tensor) -> Tensor:
        """``value`` as a tensor like the parameter, made once: a DTensor takes 0.1 ms, and a save stalls as long."""
        known = self._named.get((name, key))
        if known is None or known[0] is not value:
            known = self._named[name, key] = value, _as_parameter(value, self._held[name].parameter)
        return known[1]


def _hold(parameter: nn.Parameter) -> _Held:
    if not isinstance(parameter, DTensor):
        return _Held(parameter, parameter)
    return _Held(parameter, nn.Parameter(_local(parameter.detach())))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _build(config: OptimConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if config.name == "adamw":
        first, second = config.betas
        return torch.optim.AdamW(groups, lr=config.lr, betas=(first, second), eps=config.eps, fused=True)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)
    raise ConfigError(f"unknown optimizer {config.name!r}", where="optim.name", mend="adamw | sgd")


def _initial_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    if isinstance(optimizer, torch.optim.AdamW):
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
    # Zeros are what the first step would begin with: momentum x 0 + gradient.
    has_momentum = optimizer.param_groups[0]["momentum"] != 0
    return {"momentum_buffer": torch.zeros_like(parameter)} if has_momentum else {}


def _as_parameter(value: Tensor, parameter: nn.Parameter) -> Tensor:
    value = value.detach()
    if not isinstance(parameter, DTensor) or value.ndim == 0:
        return value
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
