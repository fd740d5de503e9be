"""Implements AdamW with moments in bf16: 4 bytes per parameter instead of 8.

The update is computed in fp32. With round-to-nearest, a bf16 second moment would never change under a large beta2,
because each addition is smaller than half a unit in the last place. Moments in bf16 are therefore rounded
stochastically. The random bits are a hash of the gradient and the step, so they are the same on all replicas, under
every layout, and after a resume.

An update consists of about 40 elementwise operations. On nodes with GPUs, torch.compile fuses them into one kernel per
tensor, including tensors that are offloaded to host memory: there the update took 7.1 s per 1e9 parameters instead of
80 s (2 threads, torch 2.13). On other nodes, the operations run one after another on pieces of a few million elements,
which limits the temporary memory. In both cases, small tensors are concatenated and updated together, which gives
bitwise the same results.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpc_train.parallel.compile import compile_in_turns

PIECE = 2**22  # elements that an eager update changes at a time, which limits the temporary memory
LARGE = 2**18  # elements; a compiled update of this size takes longer on a GPU than its launch
MOST_GRAPHS = 64  # compiled updates, one for each size; the default limit of dynamo is 8


class CompactAdamW(torch.optim.Optimizer):
    """AdamW with moments in bf16. Like torch's fused optimizers, it skips the update if ``found_inf`` is not zero.

    Args:
        backend: the backend with which torch.compile compiles the update of a tensor; None runs it eagerly. By default,
            the update is compiled for tensors on GPUs and for tensors in pinned host memory.

    Attributes:
        found_inf: a scalar on the parameters' device, set before each step.
    """

    found_inf: Tensor

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        backend: Any = "default",
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        has_gpu = any(parameter.is_cuda or parameter.is_pinned() for group in groups for parameter in group["params"])
        if backend == "default":
            backend = compile_in_turns if has_gpu else None
        self._compiled = backend is not None
        self._update: Update = _update
        if self._compiled:  # compiled for each size, without temporary tensors, so tensors are not divided
            self._update = torch.compile(_update, backend=backend, dynamic=False, fullgraph=True)

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        moments = {name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": step, **moments}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        import torch._dynamo  # a slow import, which torch's optimizers have already done

        finite = self.found_inf == 0
        with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS) if self._compiled else nullcontext():
            for group in self.param_groups:
                parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
                if parameters:
                    self._step(group, parameters, finite)

    def _step(self, group: Mapping[str, Any], parameters: Sequence[Tensor], finite: Tensor) -> None:
        from torch._dynamo.exc import TorchDynamoException

        states = [self.state[parameter] for parameter in parameters]
        terms = _terms([state["step"] for state in states], group, finite, parameters[0].dtype)
        decay = torch.full((), 1 - group["lr"] * group["weight_decay"], dtype=terms[0].step.dtype, device=finite.device)
        slices: list[_Slice] = []
        for parameter, state, term in zip(parameters, states, terms, strict=True):
            assert parameter.grad is not None
            tensors = (parameter.detach(), parameter.grad, state["exp_avg"], state["exp_avg_sq"])
            size = max(1, parameter.numel()) if self._compiled else PIECE
            for value, gradient, mean, square in zip(*(part.view(-1).split(size) for part in tensors), strict=True):
                slices.append(_Slice(value, gradient, (mean, square), term))
        for batch in _batches(slices, LARGE if self._compiled else PIECE):
            constants = (*group["betas"], group["eps"])
            try:
                _update_together(self._update, batch, finite, decay, constants)
            except TorchDynamoException as error:  # no tensor of this batch has changed yet
                self._compiled = False
                self._update = _update
                warnings.warn(
                    f"the update of optim.moments runs without torch.compile, which failed: {error}", stacklevel=2
                )
                _update_together(self._update, batch, finite, decay, constants)


class _Terms(NamedTuple):
    """Holds the factors of an update that depend on the step: ``root`` is ``sqrt(1 - beta2^step)``, ``rate`` is
    ``lr / (1 - beta1^step)``. Each is a scalar, or a tensor with a value for every element.
    """

    step: Tensor
    root: Tensor
    rate: Tensor


def _terms(steps: list[Tensor], group: Mapping[str, Any], finite: Tensor, dtype: torch.dtype) -> list[_Terms]:
    """Counts the step of each parameter and returns its terms."""
    torch._foreach_add_(steps, [finite.to(steps[0].dtype)] * len(steps))
    counts = [step.to(dtype) for step in steps]
    first, second = (torch._foreach_pow(beta, counts) for beta in group["betas"])
    for powers in (first, second):  # computes 1 - power with the same rounding
        torch._foreach_neg_(powers)
        torch._foreach_add_(powers, 1)
    torch._foreach_sqrt_(second)
    torch._foreach_reciprocal_(first)
    torch._foreach_mul_(first, group["lr"])
    return [_Terms(*terms) for terms in zip(counts, second, first, strict=True)]


@dataclass(frozen=True)
class _Slice:
    """Flat views of a parameter or a part of it, with its gradient and moments."""

    value: Tensor
    gradient: Tensor
    moments: tuple[Tensor, Tensor]
    terms: _Terms

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Returns the tensors that the update writes, and the gradient."""
        return (self.value, *self.moments, self.gradient)


def _batches(slices: Sequence[_Slice], most: int) -> Iterator[list[_Slice]]:
    """Groups slices into batches of at most ``most`` elements; a larger slice becomes a separate batch."""
    batch: list[_Slice] = []
    for piece in slices:
        if batch and sum(other.value.numel() for other in batch) + piece.value.numel() > most:
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch


Update = Callable[..., None]


def _update_together(
    update: Update, batch: Sequence[_Slice], finite: Tensor, decay: Tensor, constants: tuple[float, float, float]
) -> None:
    """Updates the slices of ``batch`` together, through copies if there are several."""
    if len(batch) == 1:
        update(batch[0].tensors, batch[0].terms, finite, decay, constants)
        return
    together = tuple(torch.cat(column) for column in zip(*(piece.tensors for piece in batch), strict=True))
    sizes = [piece.value.numel() for piece in batch]
    terms = _Terms(*(
        torch.cat([factor.expand(size) for factor, size in zip(column, sizes, strict=True)])
        for column in zip(*(piece.terms for piece in batch), strict=True)
    ))  # fmt: skip
    update(together, terms, finite, decay, constants)
    for number, updated in enumerate(together[:-1]):
        torch._foreach_copy_([piece.tensors[number] for piece in batch], updated.split(sizes))


def _update(
    tensors: Sequence[Tensor], terms: _Terms, finite: Tensor, decay: Tensor, constants: tuple[float, float, float]
) -> None:
    """Updates a flat tensor and its moments in place unless ``finite`` is false.

    Args:
        tensors: see ``_Slice.tensors``.
        decay: the factor of weight decay, ``1 - lr x weight_decay``.
        constants: beta1, beta2 and epsilon.
    """
    value, first, second, gradient = tensors
    beta1, beta2, eps = constants
    mean = first.to(value.dtype, copy=True).lerp_(gradient, 1 - beta1)
    square = second.to(value.dtype, copy=True).mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    change = square.sqrt().div_(terms.root).add_(eps)
    change = torch.div(mean, change).mul_(terms.rate)
    noise = gradient.float().view(torch.int32)
    mean = _rounded(mean.float(), noise, terms.step)
    square = _rounded(square.float(), noise, -terms.step)
    for tensor, result in ((value, (value * decay).sub_(change)), (first, mean), (second, square)):
        tensor.copy_(torch.where(finite, result, tensor))


def _rounded(value: Tensor, noise: Tensor, salt: Tensor) -> Tensor:
    """Rounds ``value`` stochastically to bf16 with a hash of ``noise`` (int32) and ``salt``; its mean is ``value``."""
    mixed = noise ^ (salt.to(torch.int32) * 0x165667B1)
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):  # the finalizer of a 32-bit hash
        mixed = (mixed ^ ((mixed >> shift) & (2 ** (32 - shift) - 1))) * factor
    return ((value.view(torch.int32) + ((mixed >> 15) & 0xFFFF)) & ~0xFFFF).view(torch.float32).bfloat16()
