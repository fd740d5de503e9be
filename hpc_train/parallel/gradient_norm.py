"""Computes the global gradient norm over pipeline, tensor and data-parallel ranks, clips the gradients, and optionally
uses them during the backward pass (``optim.in_backward``).

Every rank sums the squares of its elements, divided by the number of ranks that hold the same elements. An all-reduce
of this scalar over all ranks gives the square of the norm, without a synchronization with the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_train.errors import UserError
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.precision.masters import local_part


@torch.no_grad()  # otherwise autograd records the local part of each DTensor
def clip_(
    parameters: Mapping[str, nn.Parameter],
    mesh: Mesh,
    max_norm: float,
    loss_scale: Tensor | None = None,
    skip: frozenset[str] = frozenset(),
) -> Tensor:
    """Divides all gradients by ``loss_scale`` and scales them so that their global norm is at most ``max_norm``.

    Collective over all ranks. The gradients must be reduced over ``dp_cp`` before; None gradients are ignored.

    Args:
        parameters: canonical name -> parameter of this rank; a DTensor counts with its local shard.
        max_norm: the largest norm; 0 disables clipping.
        loss_scale: a scalar on the device, the same on every rank.
        skip: names of tied copies that another stage counts; they are scaled and not counted.

    Returns:
        The norm of the unscaled gradients before clipping: a scalar on the device, the same on every rank, and not
        finite if any gradient is not finite.
    """
    gradients: list[Tensor] = []
    counted: dict[float, list[Tensor]] = {}
    for name, parameter in parameters.items():
        if parameter.grad is None:
            continue
        gradient = parameter.grad
        if gradient.is_sparse:
            raise sparse_gradient(name)
        local = local_part(gradient)
        gradients.append(local)
        if name not in skip:
            counted.setdefault(1.0 / _holders(parameter, mesh), []).append(local)
    inverse_scale = None if loss_scale is None else loss_scale.reciprocal()
    dtype = _sum_dtype(parameters.values())  # also of a stage without gradients, which is frozen
    norm = _global_norm(counted, inverse_scale, mesh, dtype)
    factor = inverse_scale
    if max_norm > 0:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch computes it
        if inverse_scale is not None:
            factor = factor * inverse_scale
    if factor is not None:
        multiply_(gradients, factor)
    return norm


def sparse_gradient(name: str) -> UserError:
    """Returns the error for a parameter whose gradient is sparse."""
    return UserError(
        f"the gradient of {name} is sparse, but gradients are summed and clipped as dense tensors",
        where=f"model, {name}",
        fix="sparse=False in the embedding, with a dense optimizer such as optim=adamw",
    )


def _holders(parameter: nn.Parameter, mesh: Mesh) -> int:
    """Returns the number of ranks of this pipeline stage that hold the same elements of ``parameter``."""
    ranks = mesh.layout.stage_ranks
    if not isinstance(parameter, DTensor):
        return ranks
    sizes = parameter.device_mesh.shape  # is_shard() is false for a strided shard (ZeRO over tensor parallelism)
    return ranks // prod(
        size for size, placement in zip(sizes, parameter.placements, strict=True) if not placement.is_replicate()
    )


def _global_norm(
    counted: Mapping[float, list[Tensor]], inverse_scale: Tensor | None, mesh: Mesh, dtype: torch.dtype
) -> Tensor:
    total = torch.zeros((), dtype=dtype, device=mesh.device)
    replicated = 1.0 / mesh.layout.world_size
    alone = mesh.layout.pp == 1 and all(weight == replicated for weight in counted)  # this rank holds everything
    for weight, gradients in counted.items():
        stacked = torch.stack([norm.to(dtype) for norm in norms(gradients)])
        if inverse_scale is not None:  # before squaring, since the square of a scaled gradient may overflow
            stacked = stacked * inverse_scale.to(stacked.device)
        total += (1.0 if alone else weight) * stacked.square().sum().to(total.device)
    if not alone:
        # on NCCL's stream, to separate waiting from computing in traces
        work = dist.all_reduce(total, group=mesh.group("replica"), async_op=True)
        assert work is not None
        work.wait()
    return total.sqrt()


def norm_of(gradient_norms: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns the norm of gradients that every rank holds whole, from the result of ``norms``, in the order of
    ``clip_``.

    The bits are the same as with ``clip_``.
    """
    dtype = _sum_dtype(gradient_norms)
    if not gradient_norms:
        return torch.zeros((), dtype=dtype, device=device)
    return torch.stack([norm.to(dtype) for norm in gradient_norms]).square().sum().sqrt()


def _sum_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    if any(tensor.dtype == torch.float64 for tensor in tensors):
        return torch.float64
    return torch.float32


_CHUNK = 1 << 16  # elements


def norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Returns the norm of each gradient, a scalar in its dtype, but of those in bf16 in fp32.

    On a CPU torch adds the squares of a tensor in fp32: of 2^27 elements the norm is 2 % too small. There a large
    gradient is the norm of the norms of its chunks.
    """
    dtype = None
    if any(gradient.dtype is torch.bfloat16 for gradient in gradients):
        dtype = torch.float32
    if not any(gradient.device.type == "cpu" and gradient.numel() > _CHUNK for gradient in gradients):
        return list(torch._foreach_norm(list(gradients), dtype=dtype))
    found = []
    for gradient in gradients:
        chunks = [gradient]
        if gradient.device.type == "cpu" and gradient.numel() > _CHUNK:
            chunks = list(gradient.flatten().split(_CHUNK))
        of_chunks = torch._foreach_norm(chunks, dtype=dtype)
        found.append(of_chunks[0] if len(of_chunks) == 1 else torch.stack(of_chunks).norm())
    return found


def multiply_(gradients: Iterable[Tensor], factor: Tensor) -> None:
    """Multiplies local gradients of any dtypes and devices in place by a scalar on the device."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for dtype, group in by_dtype.items():
        torch._foreach_mul_(group, factor.to(group[0].device, dtype))  # offloaded gradients are on the host


Update = Callable[[Sequence[nn.Parameter], Tensor], None]  # (parameters with gradients, whether all so far are finite)


class UpdatesInBackward:
    """Updates parameters while the backward pass computes the gradients of others, and frees each gradient at once.

    Autograd adds all contributions to a gradient before it passes it on, including every use of a shared parameter, and
    no node needs the value of the parameter after that. So a parameter can change during the backward pass.

    Whether all gradients of a step are finite is known after the last one. Here an update is left out from the first
    gradient on that is not finite: a loss that is not finite makes all gradients so, and nothing changes; if a gradient
    overflows on the way, the layers behind it have been updated and those before it are not.

    Args:
        parameters: all parameters of this rank that train, which every rank holds whole.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device) -> None:
        self._parameters = list(parameters)
        self._device = device
        self._norms: dict[nn.Parameter, Tensor] = {}
        self._square = torch.zeros((), device=device)  # of the norm of all gradients so far
        self._update: Update | None = None

    @property
    def active(self) -> bool:
        """Returns whether the next backward pass updates parameters."""
        return self._update is not None

    def begin(self, update: Update) -> None:
        """Prepares a step that calls ``update``; without this call the gradients stay where they are."""
        self._update = update
        self._norms.clear()
        self._square = torch.zeros((), device=self._device)

    @torch.no_grad()
    def use(self, parameters: Sequence[nn.Parameter]) -> None:
        """Updates ``parameters``, whose gradients cover the global batch, and frees the gradients."""
        given = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        if self._update is None or not given:
            return
        gradient_norms = norms([gradient for _, gradient in given])
        chosen = [parameter for parameter, _ in given]
        self._norms.update(zip(chosen, gradient_norms, strict=True))
        self._square = self._square + torch.stack(gradient_norms).square().sum()
        self._update(chosen, self._square.isfinite())
        for parameter in chosen:
            parameter.grad = None

    def end(self) -> Tensor:
        """Ends the step and returns the norm of its gradients, a scalar that is the same on every rank."""
        self._update = None
        assert all(parameter.grad is None for parameter in self._parameters), "a gradient was not used in the backward"
        return norm_of(
            [self._norms[parameter] for parameter in self._parameters if parameter in self._norms], self._device
        )
