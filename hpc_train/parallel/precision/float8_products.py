"""Computes the product of a linear layer in fp8 and its two gradients, with scales per tensor or per row and column.

torchao's own functions (``matmul_with_hp_or_float8_args``, ``mx_mm``) compute both gradients in one node of autograd.
Zero-bubble schedules first run the nodes between the output of a stage and its input, and the nodes of the weights
later, so such a node would run twice. For them each gradient has a separate node.

Importing this module imports the compiler and torchao.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torchao.float8 import Float8LinearConfig
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_training_tensor import (
    GemmInputRole,
    LinearMMConfig,
    ScaledMMConfig,
    hp_tensor_and_scale_to_float8,
)
from torchao.float8.float8_utils import amax_to_scale, tensor_to_amax

from hpc_train.parallel.precision.float8_shards import IN, OUT, Shards

KEEPS_NODES = not torch.__version__.startswith(("2.11.", "2.12."))


class Products(Protocol):
    """Multiplies ``rows [n, in]``, ``weight [out, in]`` and the ``gradient [n, out]`` of the result, or their shards.

    It is a frozen dataclass, which torch.compile takes as a constant.
    """

    def output(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Returns ``rows @ weight.T``."""

    def of_rows(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Returns ``gradient @ weight``."""

    def of_weight(self, gradient: Tensor, rows: Tensor) -> Tensor:
        """Returns ``gradient.T @ rows``."""

    def of_both(self, gradient: Tensor, rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradients of rows and weight."""


def multiply(products: Products, splits_backward: bool, rows: Tensor, weight: Tensor) -> Tensor:
    """Returns ``rows @ weight.T`` with gradients.

    Args:
        splits_backward: whether the gradients of rows and weight are computed at different times.
    """
    if not splits_backward:
        return _apply(_Product, rows, weight, products)
    result = _apply(_ForRows, rows, weight.detach(), products)
    nothing = _apply(_ForWeight, weight, rows.detach(), products)
    # A schedule splits the backward at this node, whose gradient goes to both. Torch before 2.13 frees the node of a
    # Python function that only a schedule still refers to. Adding zeros has a node in C++, and costs one pass.
    if KEEPS_NODES:
        return _apply(_Joined, result, nothing)
    return result.add_(nothing)


def _apply(function: Any, *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)
    return result


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
class _Product(torch.autograd.Function):
    """Computes the product, and both gradients at once."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, products: Products) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.products = products
        return products.output(rows, weight)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return *ctx.products.of_both(gradient, *ctx.saved_tensors), None


class _ForRows(torch.autograd.Function):
    """Computes the product, and the gradient of its rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, products: Products) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.products = products
        return products.output(rows, weight)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.products.of_rows(gradient, *ctx.saved_tensors), None, None


class _ForWeight(torch.autograd.Function):
    """Returns a number in the shape of the product, which takes no memory, and computes the gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, products: Products) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.products = products
        return weight.new_zeros(()).expand(rows.shape[0], weight.shape[0])

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.products.of_weight(gradient, *ctx.saved_tensors), None, None


class _Joined(torch.autograd.Function):
    """Returns the product, and gives its gradient to both nodes."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, nothing: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient


INPUT, WEIGHT, GRADIENT = GemmInputRole.INPUT, GemmInputRole.WEIGHT, GemmInputRole.GRAD_OUTPUT
ROWS = 2  # besides OUT and IN, what a product can sum over
# the dimensions of a weight [out, in] that an operand has: where it has the one that is split, a rank has a part of it
_DIMENSIONS = {INPUT: (IN,), WEIGHT: (OUT, IN), GRADIENT: (OUT,)}


@dataclass(frozen=True)
class ScaledProducts:
    """Multiplies with one scale per tensor, or with one per row of the first and per column of the second operand of
    each product.

    Casts and products follow torchao's ``matmul_with_hp_or_float8_args``, in the same order. The operands may be shards
    of tensor parallelism, which use the scale of the full matrix: where ranks hold parts of what shares a scale, they
    exchange the largest magnitudes, in at most one all-reduce per product. So the operands are the same as in one
    process, and the results differ only in the order of sums.

    Attributes:
        granularity: which of these two it is.
        formats: the dtypes of input, weight and gradient.
        rounds: whether scales are rounded down to powers of two.
        kinds: torchao's settings of the three products.
        shards: None means that this rank holds the whole weight.
    """

    granularity: ScalingGranularity
    formats: tuple[torch.dtype, torch.dtype, torch.dtype]
    rounds: bool
    kinds: LinearMMConfig
    shards: Shards | None

    def output(self, rows: Tensor, weight: Tensor) -> Tensor:
        first, second = self._cast(IN, (rows, INPUT, -1), (weight.t(), WEIGHT, 0))
        return torch.mm(first, second)

    def of_rows(self, gradient: Tensor, weight: Tensor) -> Tensor:
        first, second = self._cast(OUT, (gradient, GRADIENT, -1), (weight.t(), WEIGHT, -1))
        return torch.mm(first, second.t())

    def of_weight(self, gradient: Tensor, rows: Tensor) -> Tensor:
        first, second = self._cast(ROWS, (gradient, GRADIENT, 0), (rows, INPUT, 0))
        return torch.mm(first.t(), second)

    def of_both(self, gradient: Tensor, rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        if self.granularity is not ScalingGranularity.TENSORWISE:
            return self.of_rows(gradient, weight), self.of_weight(gradient, rows)
        operands = (gradient, GRADIENT, -1), (weight.t(), WEIGHT, -1), (rows, INPUT, 0)
        passed, matrix, entered = self._cast(ROWS, *operands)  # the gradient has one scale for both products
        return torch.mm(passed, matrix.t()), torch.mm(passed.t(), entered)

    def _cast(self, summed: int, *operands: tuple[Tensor, GemmInputRole, int]) -> list[Tensor]:
        """Returns the operands in fp8.

        Args:
            summed: the dimension over which the product sums.
            operands: values, what they are, and the dimension of the values over which the product sums.
        """
        largest = [
            tensor_to_amax(values, scaling_granularity=self.granularity, axiswise_dim=dim)
            for values, _, dim in operands
        ]
        if self.shards is not None:
            parts = [number for number, (_, role, _) in enumerate(operands) if self._is_part(role, summed)]
            for number, maximum in zip(parts, _largest_of_ranks([largest[n] for n in parts], self.shards), strict=True):
                largest[number] = maximum
        along = self.granularity is ScalingGranularity.AXISWISE
        return [
            self._in_fp8(values, role, maximum, dim if along else None)
            for (values, role, dim), maximum in zip(operands, largest, strict=True)
        ]

    def _is_part(self, role: GemmInputRole, summed: int) -> bool:
        """Returns whether ranks hold parts of what shares a scale: of the operand, or of the dimension summed over."""
        assert self.shards is not None
        of_tensor = self.granularity is ScalingGranularity.TENSORWISE
        if of_tensor:
            return self.shards.dim in _DIMENSIONS[role]
        return self.shards.dim == summed

    def _in_fp8(self, values: Tensor, role: GemmInputRole, largest: Tensor, dim: int | None) -> Tensor:
        dtype = self.formats[(INPUT, WEIGHT, GRADIENT).index(role)]
        scale = amax_to_scale(largest, dtype, self.rounds)
        result: Tensor = hp_tensor_and_scale_to_float8(values, scale, dtype, self.kinds, role, dim)
        return result


def _largest_of_ranks(local_maxima: Sequence[Tensor], shards: Shards) -> Sequence[Tensor]:
    """Returns the largest values of all ranks for the largest values of this one."""
    if not local_maxima:
        return local_maxima
    functional = torch.ops._c10d_functional
    together = torch.cat([values.reshape(-1) for values in local_maxima])
    maxima = functional.wait_tensor(functional.all_reduce(together, "max", shards.group))
    return [
        part.view_as(values)
        for part, values in zip(maxima.split([values.numel() for values in local_maxima]), local_maxima, strict=True)
    ]


def scaled_products(recipe: str, emulate: bool, shards: Shards | None) -> ScaledProducts:
    """Returns the products with the scaling ``recipe`` of torchao.

    Args:
        recipe: ``tensorwise`` or ``rowwise``.
        emulate: whether products are computed in fp32, from values that are rounded to fp8.
        shards: None means that this rank holds the whole weight.
    """
    config = Float8LinearConfig.from_recipe_name(recipe)
    gemms = config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight
    casts = config.cast_config_input, config.cast_config_weight, config.cast_config_grad_output
    return ScaledProducts(
        config.cast_config_input.scaling_granularity,
        (casts[0].target_dtype, casts[1].target_dtype, casts[2].target_dtype),
        config.round_scales_to_power_of_2,
        LinearMMConfig(*(ScaledMMConfig(emulate, gemm.use_fast_accum, False, False) for gemm in gemms)),
        shards,
    )
