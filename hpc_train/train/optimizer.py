"""Runs AdamW and SGD on the local shards of the parameters, and computes the learning rate of each step.

Both optimizers are elementwise, so each rank updates its local shards as plain tensors, with one fused kernel per group
and without DTensor's dispatch. If the gradient norm is not finite, the fused kernels leave parameters and state
unchanged (``found_inf``, the protocol of ``torch.amp.GradScaler``); the host does not read the flag. The learning rate
is a pure function of the step, so it has no state to save or resume.

With offload (ZeRO-Offload: Ren et al. 2021, arXiv:2101.06840) the state and a copy of the parameters are in host
memory: gradients are copied to the host, which takes the step and copies the new parameters back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo  # torch's optimizers import it when the first one is made: the warm parent does it for all workers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from hpc_train.config.schema import OptimConfig
from hpc_train.errors import UserError
from hpc_train.train.compact_adamw import CompactAdamW, is_8bit, wide


@dataclass(frozen=True)
class _Held:
    """Pairs a parameter with the tensor that the optimizer updates: itself, its local shard, or a copy on the host."""

    parameter: nn.Parameter
    local: nn.Parameter
    offloaded: bool

    def refresh(self) -> None:
        """Updates ``local`` and its gradient, since FSDP2 may replace a shard's memory and makes new gradients."""
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
        """Copies the parameter's value from the device to the host if it is offloaded."""
        if self.offloaded:
            self.local.data.copy_(_local(self.parameter.detach()))

    def write_back(self) -> None:
        """Copies the updated value from the host to the device if it is offloaded."""
        if self.offloaded:
            _local(self.parameter.detach()).copy_(self.local, non_blocking=True)


class Optimizer:
    """Updates ``parameters`` (canonical name -> parameter of this rank).

    Weight decay applies to parameters with two or more dimensions, not to biases and norms. All state is allocated at
    construction, so that a checkpoint can be loaded into it before the first step.

    Args:
        offload: whether to keep the state in host memory and take the steps there.
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
        self._named: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}  # (tensor of the optimizer, its DTensor view)
        self._widened: list[tuple[Tensor, Tensor]] = []  # (8-bit moment, its fp32 copy for a checkpoint)
        self._before_update: list[Callable[[], None]] = []
        for held in self._held.values():
            self._inner.state[held.local] = _initial_state(self._inner, held.local)

    @torch.no_grad()
    def step(self, learning_rate: float, finite: Tensor) -> None:
        """Updates the parameters from their ``.grad`` unless ``finite`` (a scalar bool on the device) is false."""
        while self._before_update:
            self._before_update.pop()()
        for held in self._held.values():
            held.refresh()
        for group in self._inner.param_groups:
            group["lr"] = learning_rate
        # with offload this copy waits for the device and thereby for the copies of the gradients
        device = next(iter(self._held.values())).local.device if self._held else finite.device
        self._inner.found_inf = (~finite).to(device, torch.float32)  # type: ignore[attr-defined]
        self._inner.step()
        for held in self._held.values():
            held.write_back()

    def before_next_update(self, action: Callable[[], None]) -> None:
        """Calls ``action`` once, before the next update changes a parameter or the state."""
        self._before_update.append(action)

    def named_state(self) -> dict[str, dict[str, Tensor]]:
        """Returns canonical name -> key -> tensor, sharded like the parameter.

        The tensors share memory with the optimizer, except for 8-bit moments, whose blocks depend on the layout: these
        are copies in fp32 in host memory. Call ``loaded`` after a load into the tensors.
        """
        self._widened.clear()
        return {
            name: {key: self._like_parameter(name, key, value) for key, value in self._inner.state[held.local].items()}
            for name, held in self._held.items()
        }

    def tensors(self) -> Iterator[Tensor]:
        """Yields all tensors of the state as they are stored, i.e. codes and scales of 8-bit moments."""
        for state in self._inner.state.values():
            for value in state.values():
                yield from (value.codes, value.scale) if is_8bit(value) else (value,)

    @torch.no_grad()
    def loaded(self) -> None:
        """Takes over values that a checkpoint load has written to the parameters and to ``named_state``."""
        for held in self._held.values():
            held.fetch()
        for moment, widened in self._widened:
            moment.copy_(widened.to(moment.device))
        self._widened.clear()

    def _like_parameter(self, name: str, key: str, value: Tensor) -> Tensor:
        """Returns ``value`` sharded like the parameter; cached, since a DTensor takes 0.1 ms to make in each save."""
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
    raise UserError(f"unknown optimizer {config.name!r}", where="optim.name", fix="use adamw or sgd")


def _initial_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    if isinstance(optimizer, CompactAdamW):
        return optimizer.initial_state(parameter)
    if isinstance(optimizer, torch.optim.AdamW):
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
    # the first step from zeros gives the same result: momentum x 0 + gradient
    has_momentum = optimizer.param_groups[0]["momentum"] != 0
    return {"momentum_buffer": torch.zeros_like(parameter)} if has_momentum else {}


def _as_parameter(value: Tensor, parameter: nn.Parameter) -> Tensor:
    value = value.detach()
    if not isinstance(parameter, DTensor) or value.ndim == 0:
        return value
    # from_local would move a tensor on the host to the mesh's device
    meta = TensorMeta(parameter.shape, parameter.stride(), value.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
    return DTensor(value, spec, requires_grad=False)  # type: ignore[call-arg]


LR_SCALINGS = ("none", "linear", "sqrt")
SCHEDULES = ("constant", "linear", "cosine", "wsd")


def peak_rate(config: OptimConfig, batch_size: int) -> float:
    """Returns the highest learning rate of a run with ``batch_size`` samples per step.

    ``linear`` (Goyal et al. 2017, arXiv:1706.02677): lr x batch / base_batch. ``sqrt`` (Krizhevsky 2014,
    arXiv:1404.5997; for Adam Malladi et al. 2022, arXiv:2205.10287): lr x sqrt(batch / base_batch).
    """
    ratio = batch_size / config.base_batch
    match config.lr_scaling:
        case "none":
            return config.lr
        case "linear":
            return config.lr * ratio
        case "sqrt":
            return config.lr * math.sqrt(ratio)
    raise UserError(
        f"unknown learning rate scaling {config.lr_scaling!r}",
        where="optim.lr_scaling",
        fix=f"use one of {' | '.join(LR_SCALINGS)}",
    )


def rate(config: OptimConfig, peak: float, step: int, total_steps: int) -> float:
    """Returns the learning rate of step ``step`` in [0, ``total_steps``).

    It rises linearly over ``warmup_steps`` (step 0 has 1 / warmup_steps of the peak) and then follows the schedule; all
    but ``constant`` reach ``min_lr_ratio`` x peak at the last step. ``cosine``: Loshchilov and Hutter 2016,
    arXiv:1608.03983. ``wsd`` (warm-up, stable, decay: Hu et al. 2024, arXiv:2404.06395) falls linearly in the last
    ``decay_share`` of all steps.
    """
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    return peak * _factor(config, step, total_steps)


def _factor(config: OptimConfig, step: int, total_steps: int) -> float:
    last, lowest = total_steps - 1, config.min_lr_ratio
    match config.schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - (1.0 - lowest) * _progress(step, config.warmup_steps, last)
        case "cosine":
            decayed = 0.5 * (1.0 - math.cos(math.pi * _progress(step, config.warmup_steps, last)))
            return 1.0 - (1.0 - lowest) * decayed
        case "wsd":
            begin = max(config.warmup_steps, total_steps - math.ceil(config.decay_share * total_steps) - 1)
            return 1.0 - (1.0 - lowest) * _progress(step, begin, last)
    raise UserError(
        f"unknown learning rate schedule {config.schedule!r}",
        where="optim.schedule",
        fix=f"use one of {' | '.join(SCHEDULES)}",
    )


def _progress(step: int, begin: int, end: int) -> float:
    """Returns the fraction of [begin, end] that has passed at ``step``, clamped to [0, 1]."""
    if step <= begin:
        return 0.0
    return min(1.0, (step - begin) / max(1, end - begin))
