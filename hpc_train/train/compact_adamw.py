"""Implements AdamW with compact moments: bf16 (4 bytes per parameter instead of 8) or block-wise 8 bits (2 bytes).

The update is computed in fp32, in pieces of a few million elements. With round-to-nearest, a bf16 second moment would
never change under a large beta2, because the additions are smaller than half a unit in the last place. Moments are
therefore rounded stochastically. The random bits are a hash of the gradient and the step, so they are the same on
replicas, under every layout, and after a resume. The 8-bit format is Dettmers et al.'s (2021, arXiv:2110.02861) as
torchao implements it: blocks of 256 values with one scale each and 256 dynamic codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hpc_train.errors import UserError

BLOCK = 256
MIN_ELEMENTS = 4096  # elements; smaller tensors and those that are not a multiple of BLOCK keep fp32 moments
PIECE = 2**22  # elements; a multiple of BLOCK


class CompactAdamW(torch.optim.Optimizer):
    """Runs AdamW with compact moments; like torch's fused optimizers it skips the update if ``found_inf`` is not zero.

    Args:
        moments: ``bf16`` or ``8bit``.

    Attributes:
        found_inf: a scalar on the parameters' device, set before each step.

    Raises:
        UserError: ``8bit`` is requested and torchao is not installed.
    """

    found_inf: Tensor

    def __init__(
        self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float, moments: str
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._zeros = _zeros_of(moments)

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return {"step": step, "exp_avg": self._zeros(parameter, True), "exp_avg_sq": self._zeros(parameter, False)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        finite = self.found_inf == 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(parameter, self.state[parameter], group, finite)


def _update(parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any], finite: Tensor) -> None:
    """Updates one parameter and its moments unless ``finite`` is false."""
    state["step"] += finite
    step = state["step"].to(parameter.dtype)
    beta1, beta2 = group["betas"]
    rate = group["lr"]
    root = (1 - beta2**step).sqrt()
    pieces = zip(
        _pieces(parameter.detach()), _pieces(parameter.grad), _pieces(state["exp_avg"]), _pieces(state["exp_avg_sq"]),
        strict=True,
    )  # fmt: skip
    for value, gradient, first, second in pieces:
        mean = wide(first, value.dtype).lerp_(gradient, 1 - beta1)
        square = wide(second, value.dtype).mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        change = mean / (square.sqrt() / root + group["eps"]) * (rate / (1 - beta1**step))
        changed = value * (1 - rate * group["weight_decay"]) - change
        value.copy_(torch.where(finite, changed, value))
        _store(first, mean, finite, gradient, step)
        _store(second, square, finite, gradient, -step)


def wide(moment: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a copy of ``moment`` in ``dtype``."""
    return moment.dequantize().to(dtype) if is_8bit(moment) else moment.to(dtype, copy=True)


def is_8bit(moment: Tensor) -> bool:
    return hasattr(moment, "codes")


def _store(moment: Any, value: Tensor, finite: Tensor, gradient: Tensor, salt: Tensor) -> None:
    if is_8bit(moment):
        fresh = type(moment)(torch.empty_like(moment.codes), torch.empty_like(moment.scale), moment.qmap, moment.signed)
        fresh.copy_(value.float())
        moment.codes.copy_(torch.where(finite, fresh.codes, moment.codes))
        moment.scale.copy_(torch.where(finite, fresh.scale, moment.scale))
        return
    rounded = _bf16(value.float(), gradient.float(), salt) if moment.dtype is torch.bfloat16 else value
    moment.copy_(torch.where(finite, rounded, moment))


def _bf16(value: Tensor, gradient: Tensor, salt: Tensor) -> Tensor:
    """Rounds stochastically to bf16 with a hash of ``gradient`` and ``salt``; the expected result is ``value``."""
    mixed = gradient.view(torch.int32) ^ (salt.to(torch.int32) * 0x165667B1)
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):  # the finaliser of a 32-bit hash
        mixed = (mixed ^ ((mixed >> shift) & (2 ** (32 - shift) - 1))) * factor
    noise = (mixed >> 15) & 0xFFFF
    return ((value.view(torch.int32) + noise) & ~0xFFFF).view(torch.float32).bfloat16()


def _pieces(tensor: Any) -> Sequence[Any]:
    """Splits a tensor into flat views of at most ``PIECE`` elements."""
    if not is_8bit(tensor):
        return tensor.view(-1).split(PIECE)
    codes, scales = tensor.codes.view(-1).split(PIECE), tensor.scale.split(PIECE // BLOCK)
    return [type(tensor)(code, scale, tensor.qmap, tensor.signed) for code, scale in zip(codes, scales, strict=True)]


def _zeros_of(moments: str) -> Callable[[Tensor, bool], Tensor]:
    if moments == "bf16":
        return lambda parameter, signed: torch.zeros_like(parameter, dtype=torch.bfloat16)
    state_8bit = _state_8bit()

    def zeros(parameter: Tensor, signed: bool) -> Tensor:
        if parameter.numel() < MIN_ELEMENTS or parameter.numel() % BLOCK:
            return torch.zeros_like(parameter)
        state: Any = state_8bit.zeros(parameter.shape, signed, BLOCK, parameter.device)
        if signed:
            state.qmap[0] = -1.0  # symmetric to the code 1.0, so that storing a dequantized block again is exact
        state.codes.fill_(int((state.qmap == 0).nonzero()))
        return state

    return zeros


def _state_8bit() -> Any:
    try:
        from torchao.optim.subclass_8bit import OptimState8bit
    except ImportError as error:
        raise UserError(
            f"optim.moments=8bit needs torchao, which cannot be imported: {error}",
            where="optim.moments",
            fix="pip install 'hpc_train[8bit]', or optim.moments=bf16, which needs no extra package",
        ) from error
    return OptimState8bit
