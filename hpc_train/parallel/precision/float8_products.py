"""Gives a product of a linear layer in fp8 its two gradients, from three methods that compute one product each.

torchao's own functions (``matmul_with_hp_or_float8_args``, ``mx_mm``) compute both gradients in one node of autograd.
Zero-bubble schedules first run the nodes between the output of a stage and its input, and those of the weights later,
so such a node would run twice. For them each gradient has a separate node.

Importing this module imports the compiler.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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
    return _join(result, _apply(_ForWeight, weight, rows.detach(), products))


def _join(result: Tensor, nothing: Tensor) -> Tensor:
    """Returns ``result`` from the node at which a schedule splits the backward; its gradient goes to both nodes.

    Torch before 2.13 frees a Python function's node that only a schedule still refers to. Adding zeros has a node in
    C++, and costs one pass over the result.
    """
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
