"""AdamW and SGD over the local shards of the parameters, gated by a flag that stays on the device.

Both are elementwise, so each rank updates the shards that it holds as plain tensors: one fused kernel per group under
every strategy, without DTensor's dispatch. Where the gradient norm is not finite the fused kernels leave parameters and
state as they are (``found_inf``, the protocol of ``torch.amp.GradScaler``), and the host is not asked.

Offloaded (ZeRO-Offload: Ren et al. 2021, arXiv:2101.06840), state and a copy of the parameters are in host memory: the
gradients come there, the host takes the step, and the new parameters go back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from hpc_train.config.schema import OptimConfig
from hpc_train.errors import UserError
from hpc_train.train.compact_adamw import CompactAdamW, is_8bit, wide


@dataclass(frozen=True)
class _Held:
    """A parameter and what the optimizer updates: itself, for a DTensor its local shard, or a copy on the host."""

    parameter: nn.Parameter
    local: nn.Parameter
    offloaded: bool

    def refresh(self) -> None:
        """FSDP2 may exchange the memory of a shard when it first runs, and makes a new gradient in each step."""
        gradient = None if self.parameter.grad is None else _local(self.parameter.grad)
        if not self.offloaded:
            if self.local is not self.parameter:
                self.local.data = _local(self.parameter)
                self.local.grad = gradient
        elif gradient is None:
            self.local.grad = None
        else:
            if self.local.grad is None:
                self.local.grad = _on_host(gradient)
            self.local.grad.copy_(gradient, non_blocking=True)

    def fetch(self) -> None:
        """The parameter's value from the device."""
        if self.offloaded:
            self.local.data.copy_(_local(self.parameter.detach()))

    def write_back(self) -> None:
        if self.offloaded:
            _local(self.parameter.detach()).copy_(self.local, non_blocking=True)


class Optimizer:
    """Updates ``parameters`` (canonical name -> parameter of this rank).

    Weight decay applies to parameters with two or more dims: not to biases and the gains of norms. All state exists
    from the beginning, so that a checkpoint can be loaded into it before the first step.

    Args:
        offload: keep the state in host memory and take the steps there.
    """

    def __init__(self, config: OptimConfig, parameters: Mapping[str, nn.Parameter], offload: bool = False) -> None:
        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self._held = {name: _hold(parameter, offload) for name, parameter in trained.items()}
        groups = []
        for decay in (True, False):
            members = [held.local for held in self._held.values() if (held.parameter.ndim >= 2) == decay]
            if members:
                groups.append({"params": members, "weight_decay": config.weight_decay if decay else 0.0})
        self._inner = _build(config, groups)
        self._named: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}  # the optimizer's own, and as a parameter
        self._widened: list[tuple[Tensor, Tensor]] = []  # moments of 8 bits, and as checkpoints have them
        for held in self._held.values():
            self._inner.state[held.local] = _initial_state(self._inner, held.local)

    @torch.no_grad()
    def step(self, learning_rate: float, finite: Tensor) -> None:
        """One update from the parameters' ``.grad``; none where ``finite`` (a scalar bool on the device) is false."""
        for held in self._held.values():
            held.refresh()
        for group in self._inner.param_groups:
            group["lr"] = learning_rate
        # on the host (offloaded) this waits for the device, and so for the gradients that were sent before
        device = next(iter(self._held.values())).local.device if self._held else finite.device
        self._inner.found_inf = (~finite).to(device, torch.float32)  # type: ignore[attr-defined]
        self._inner.step()
        for held in self._held.values():
            held.write_back()

    def named_state(self) -> dict[str, dict[str, Tensor]]:
        """Canonical name -> key -> tensor, sharded like the parameter.

        It shares memory with the optimizer, but for moments of 8 bits: these are widened to fp32, in host memory, since
        their blocks are of one layout only. After a load into these tensors call ``loaded``.
        """
        self._widened.clear()
        return {
            name: {key: self._shared(name, key, value) for key, value in self._inner.state[held.local].items()}
            for name, held in self._held.items()
        }

    def tensors(self) -> Iterator[Tensor]:
        """All of the state, as it is kept; of moments of 8 bits the codes and scales."""
        for state in self._inner.state.values():
            for value in state.values():
                yield from (value.codes, value.scale) if is_8bit(value) else (value,)

    @torch.no_grad()
    def loaded(self) -> None:
        """After a checkpoint was loaded into the parameters, and perhaps into ``named_state``."""
        for held in self._held.values():
            held.fetch()
        for moment, widened in self._widened:
            moment.copy_(widened.to(moment.device))
        self._widened.clear()

    def _shared(self, name: str, key: str, value: Tensor) -> Tensor:
        """``value`` as a tensor like the parameter, made once: a DTensor takes 0.1 ms, and a save stalls as long."""
        if is_8bit(value):
            self._widened.append((value, wide(value, torch.float32).cpu()))
            return _as_parameter(self._widened[-1][1], self._held[name].parameter)
        known = self._named.get((name, key))
        if known is None or known[0] is not value:
            known = self._named[name, key] = value, _as_parameter(value, self._held[name].parameter)
        return known[1]


def _hold(parameter: nn.Parameter, offload: bool) -> _Held:
    local = _local(parameter.detach())
    if offload:
        return _Held(parameter, nn.Parameter(_on_host(local).copy_(local)), True)
    return _Held(parameter, nn.Parameter(local) if isinstance(parameter, DTensor) else parameter, False)


def _on_host(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _build(config: OptimConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if config.name == "adamw":
        first, second = config.betas
        if config.moments != "fp32":
            return CompactAdamW(groups, lr=config.lr, betas=(first, second), eps=config.eps, moments=config.moments)
        return torch.optim.AdamW(groups, lr=config.lr, betas=(first, second), eps=config.eps, fused=True)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)
    raise UserError(f"unknown optimizer {config.name!r}", where="optim.name", fix="adamw | sgd")


def _initial_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    if isinstance(optimizer, CompactAdamW):
        return optimizer.initial_state(parameter)
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
    # not by from_local: it would move what is on the host to the mesh's device
    whole = TensorMeta(parameter.shape, parameter.stride(), value.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=whole)
    return DTensor(value, spec, requires_grad=False)  # type: ignore[call-arg]
