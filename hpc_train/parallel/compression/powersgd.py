"""Implements PowerSGD (Vogels et al. 2019, arXiv:1905.13727, algorithms 1 and 2).

Each gradient matrix is sent as a product of two thin matrices, computed by one step of subspace iteration that starts
from the basis of the previous step. The error of the product is added to the next gradient (error feedback). Vectors,
and matrices for which two factors would not be smaller, are sent uncompressed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.parallel.compression.exchange import PendingState, flatten, unflatten, zeros
from hpc_train.parallel.parallelise import parameter_seed


class PowerSGD:
    """Sums a bucket with two all-reduces, of the left and of the right factors; implements ``Exchange``.

    Args:
        parameters: name -> parameter; ``seed`` and the name determine the first basis.
        rank: the rank of the approximation.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup, rank: int, seed: int = 0
    ) -> None:
        self._group = group
        chosen = {name: p for name, p in parameters.items() if pays(p.shape, rank)}
        self._residual = zeros(chosen.values())
        self._basis = PendingState((p, _first_basis(p, rank, parameter_seed(seed, name))) for name, p in chosen.items())

    def run(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> Iterator[dist.Work]:
        """See ``Exchange.run``."""
        pairs = list(zip(parameters, gradients, strict=True))
        others = [gradient for parameter, gradient in pairs if parameter not in self._basis]
        matrices = [(parameter, gradient) for parameter, gradient in pairs if parameter in self._basis]
        corrected = [_as_matrix(self._residual[parameter] + gradient) for parameter, gradient in matrices]
        lefts = [matrix @ self._basis[p] for matrix, (p, _) in zip(corrected, matrices, strict=True)]  # [rows, rank]
        flat = flatten([*lefts, *others])
        yield dist.all_reduce(flat, group=self._group, async_op=True)
        unflatten(flat, [*lefts, *others])
        if not matrices:
            return
        lefts = [_orthonormal(left) for left in lefts]
        rights = [matrix.t() @ left for matrix, left in zip(corrected, lefts, strict=True)]  # [columns, rank]
        for matrix, left, right, (parameter, _) in zip(corrected, lefts, rights, matrices, strict=True):
            self._residual.set_next(parameter, matrix.sub_(left @ right.t()))
        flat = flatten(rights)
        yield dist.all_reduce(flat, group=self._group, async_op=True)
        unflatten(flat, rights)
        for left, right, (parameter, gradient) in zip(lefts, rights, matrices, strict=True):
            gradient.copy_((left @ right.t()).view_as(gradient))
            self._basis.set_next(parameter, _orthonormal(right))

    def commit(self, finite: Tensor) -> None:
        self._residual.commit(finite)
        self._basis.commit(finite)

    def local_state(self, parameter: nn.Parameter) -> Mapping[str, Tensor]:
        return {"residual": self._residual[parameter]} if parameter in self._residual else {}

    def shared_state(self, parameter: nn.Parameter) -> Mapping[str, Tensor]:
        return {"basis": self._basis[parameter]} if parameter in self._basis else {}


def pays(shape: Sequence[int], rank: int) -> bool:
    """Returns whether the two factors of a gradient of ``shape`` have fewer elements than the gradient."""
    if len(shape) < 2:
        return False
    rows, columns = shape[0], math.prod(shape[1:])
    return (rows + columns) * min(rank, rows, columns) < rows * columns


def _as_matrix(gradient: Tensor) -> Tensor:
    """Returns the gradient as ``[rows, columns]``; a convolution's columns are its input channels and kernel."""
    return gradient.reshape(gradient.shape[0], -1)


def _first_basis(parameter: nn.Parameter, rank: int, seed: int) -> Tensor:
    """Returns an orthonormal basis, ``[columns, rank]``."""
    rows, columns = parameter.shape[0], parameter[0].numel()
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(columns, min(rank, rows, columns), generator=generator, dtype=parameter.dtype)
    return _orthonormal(drawn).to(parameter.device)


def _orthonormal(columns: Tensor) -> Tensor:
    return torch.linalg.qr(columns).Q.contiguous()
