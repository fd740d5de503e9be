"""Multiplies in mxfp8, with one scale per block of 32 values along the dimension over which a product sums, by torchao.

Casts and products follow torchao's ``mx_mm``, in the same order. Under tensor parallelism blocks lie inside the shards,
so the operands are the same as in one process, without any exchange.

Importing this module imports torchao.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torchao.prototype.mx_formats.config import (
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    ScaleCalculationMode,
)
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.utils import _to_mxfp8_dim1_kernel_wrapper
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

BLOCK, FORMAT, SCALES = 32, torch.float8_e4m3fn, ScaleCalculationMode.RCEIL


@dataclass(frozen=True)
class BlockProducts:
    """Computes the products of a linear layer in fp8, with one scale for each block of 32 values (mxfp8).

    Attributes:
        emulate: whether products are computed in bf16, from values that are rounded to fp8.
    """

    emulate: bool

    def output(self, rows: Tensor, weight: Tensor) -> Tensor:
        return torch.mm(self._by_row(rows), self._by_row(weight).t())

    def of_rows(self, gradient: Tensor, weight: Tensor) -> Tensor:
        return torch.mm(self._by_row(gradient.contiguous()), self._by_column(weight).t())

    def of_weight(self, gradient: Tensor, rows: Tensor) -> Tensor:
        return torch.mm(self._by_column(gradient.contiguous()), self._by_column(rows).t())

    def of_both(self, gradient: Tensor, rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self.of_rows(gradient, weight), self.of_weight(gradient, rows)

    def _by_row(self, values: Tensor) -> Tensor:
        kernels = KernelPreference.EMULATED if self.emulate else KernelPreference.AUTO
        choice = MXFP8Dim0CastKernelChoice.TORCH if self.emulate else MXFP8Dim0CastKernelChoice.TRITON
        result: Tensor = MXTensor.to_mx(values, FORMAT, BLOCK, SCALES, kernels, mxfp8_dim0_cast_kernel_choice=choice)
        return result

    def _by_column(self, values: Tensor) -> Tensor:
        """Returns the transposed values, with blocks in the columns of ``values``."""
        if self.emulate:
            return self._by_row(values.t().contiguous())
        choice = MXFP8Dim1CastKernelChoice.CUDA
        kernels = KernelPreference.AUTO
        result: Tensor = _to_mxfp8_dim1_kernel_wrapper(values, BLOCK, FORMAT, values.dtype, kernels, choice, SCALES)
        return result
