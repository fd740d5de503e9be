"""Computes the matrix products of layers in fp8, by torchao: tensorwise, rowwise or mxfp8 scales.

A product and its two gradients take operands in 8 bits, which are scaled so that the largest magnitude of a tensor, a
row, or a block of 32 values is the largest number of the format (Micikevicius et al. 2022, arXiv:2209.05433; mxfp8:
Rouhani et al. 2023, arXiv:2310.10537). The scales are recomputed in each product, so checkpoints contain nothing in
addition, and the parameters keep their names, values and dtype. What is saved for the backward pass stays in bf16.

Only plain linear layers inside the layers of a model take part. The first and the last matrices of a model are the most
sensitive to rounding, and a loss that is fused with the head computes its product itself. Units of fp8 take matrices
whose sizes are multiples of 16 (mxfp8: 32); rows of the input are padded with zeros to such a multiple.

The operands are the bf16 casts that a step keeps (``KeptCasts``) or that ZeRO gathers, and shards of tensor
parallelism have the scales of whole matrices (``float8_products.py``), so all strategies compute the same numbers. A
micro-batch is scaled by itself, so the rounding depends on its size. Queries, keys and values are not computed
together, since one scale would then serve three matrices.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_train.config.import_path import how_to_install
from hpc_train.config.schema import PrecisionConfig
from hpc_train.errors import UserError
from hpc_train.layout.float8 import MULTIPLES, OFF, WHERE, check_architecture, why_not_float8
from hpc_train.layout.optimizers import shortened
from hpc_train.models.linear_layers import CASTS, cast_weight, linear_layers, product_dtype
from hpc_train.parallel.precision.float8_shards import Shards, linear_of_shards, shards_of

Multiply = Callable[[Tensor, Tensor], Tensor]  # (rows [n, in], weight [out, in]) -> [n, out]
OPERANDS = torch.bfloat16  # the dtype of the operands before they are cast to fp8, and of the results
ROWS = 32  # the number of rows is padded to a multiple of it


class Float8Linear(nn.Linear):
    """Computes the product of a linear layer in fp8 under autocast to bf16, and as ``nn.Linear`` outside of it.

    Attributes:
        multiply: the product, with gradients.
    """

    multiply: Multiply

    def forward(self, input: Tensor) -> Tensor:
        if product_dtype(input) is not OPERANDS:
            return F.linear(input, self.weight, self.bias)
        weight = cast_weight(self)
        operand = input.to(OPERANDS)
        bias = None if self.bias is None else self._cast_bias()
        if isinstance(weight, DTensor):
            return linear_of_shards(self._product, operand, weight, bias)
        result = self._product(operand, weight)
        if bias is None:
            return result
        return result + bias

    def _product(self, input: Tensor, weight: Tensor) -> Tensor:
        rows = input.reshape(-1, weight.shape[1])
        count = rows.shape[0]
        if count % ROWS:
            rows = F.pad(rows, (0, 0, 0, -count % ROWS))
        return self.multiply(rows, weight)[:count].view(*input.shape[:-1], weight.shape[0])

    def _cast_bias(self) -> Tensor:
        casts: tuple[Tensor, Tensor | None] | None = getattr(self, CASTS, None)
        bias = self.bias if casts is None else casts[1]
        assert bias is not None
        return bias.to(OPERANDS)


@dataclass(frozen=True)
class Matrices:
    """Lists the matrices of a model.

    Attributes:
        chosen: the names of the linear layers that compute in fp8.
        skipped: the names of the other linear layers -> why they do not.
    """

    chosen: tuple[str, ...]
    skipped: dict[str, str]


def matrices(model: nn.Module, precision: PrecisionConfig) -> Matrices:
    """Returns which linear layers of ``model`` (whole or a stage) compute in fp8."""
    chosen = list[str]()
    skipped = dict[str, str]()
    for name, module, unfit in linear_layers(model, plain=(nn.Linear, Float8Linear)):
        reason = unfit or why_not_float8(name, module.in_features, module.out_features, precision)
        if reason:
            skipped[name] = reason
        else:
            chosen.append(name)
    return Matrices(tuple(chosen), skipped)


def use_float8(
    model: nn.Module, precision: PrecisionConfig, device: torch.device, splits_backward: bool = False
) -> None:
    """Makes linear layers of ``model`` (whole or a stage) compute in fp8, in place, if ``precision.fp8`` is set.

    Call it after tensor parallelism is applied, and before anything else wraps the model.

    Args:
        splits_backward: whether a pipeline schedule computes the gradients of inputs and weights at different times.

    Raises:
        UserError: torchao is missing or too old, or shards of a matrix cannot be computed in fp8.
    """
    if precision.fp8 is None:
        return
    emulate = device.type == "cpu"
    for name in matrices(model, precision).chosen:
        module: Any = model.get_submodule(name)
        module.__class__ = Float8Linear  # which keeps parameters, hooks and the references of the owner
        shards = None
        if isinstance(module.weight, DTensor):
            shards = shards_of(name, module.weight, precision.fp8)
        module.multiply = _multiply(precision.fp8, emulate, splits_backward, shards)


def check_use(model: nn.Module, precision: PrecisionConfig, device: torch.device, compiled: bool) -> str | None:
    """Checks a whole model and the device of this rank before the training; returns one line that describes what is
    done.

    Raises:
        UserError: no matrix can be computed in fp8, torchao is missing, the device has no units for it, or
            ``precision.fp8_skip`` names no matrix.
    """
    if precision.fp8 is None:
        return None
    selection = matrices(model, precision)
    if not selection.chosen:
        raise UserError(
            f"precision.fp8 is {precision.fp8}, but no matrix of the model can be computed in fp8: "
            f"{_reasons(selection)}",
            where=WHERE,
            fix=f"layers with linear layers whose sizes are multiples of {MULTIPLES[str(precision.fp8)]}, or {OFF}",
        )
    names = [*selection.chosen, *selection.skipped]
    for pattern in precision.fp8_skip:
        if not any(re.search(pattern, name) for name in names):
            raise UserError(
                f"precision.fp8_skip has {pattern!r}, which matches no matrix of the model",
                where="precision.fp8_skip",
                fix=f"a part of a name, such as those of {shortened(names)}",
            )
    check_device(precision.fp8, device)
    _try_product(precision.fp8, device)
    slow = "; train.compile=true fuses the casts, which are slow alone"
    if compiled or device.type == "cpu":
        slow = ""
    note = "; emulated, as CPUs have no fp8: slower than bf16, with the same rounding"
    if device.type != "cpu":
        note = slow
    total = len(selection.chosen) + len(selection.skipped)
    shown = f"fp8 ({precision.fp8}): {len(selection.chosen)} of {total} matrices, {shortened([*selection.chosen])}"
    return f"{shown}{f'; bf16: {_reasons(selection)}' if selection.skipped else ''}{note}"


def _reasons(selection: Matrices) -> str:
    by_reason: dict[str, list[str]] = {}
    for name, reason in selection.skipped.items():
        by_reason.setdefault(reason, []).append(name)
    return ", ".join(f"{shortened(names)} ({reason})" for reason, names in by_reason.items()) or "it has none"


def check_device(recipe: str, device: torch.device) -> None:
    """Checks that ``device`` supports the scaling ``recipe``.

    Raises:
        UserError: a GPU has no units for this scaling. A CPU emulates all of them.
    """
    if device.type != "cuda":
        return
    if torch.version.hip is not None:
        architecture = torch.cuda.get_device_properties(device).gcnArchName
    else:
        architecture = "{}.{}".format(*torch.cuda.get_device_capability(device))
    check_architecture(recipe, torch.cuda.get_device_name(device), architecture)


def _try_product(recipe: str, device: torch.device) -> None:
    """Computes one small product with its gradients, since a kernel may be missing in this build of torch or torchao.

    Raises:
        UserError: it fails.
    """
    multiply = _multiply(recipe, emulate=device.type == "cpu")
    rows, weight = (torch.ones(128, 128, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(2))
    try:
        multiply(rows, weight).sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except (RuntimeError, NotImplementedError, AssertionError, AttributeError, TypeError) as error:
        raise UserError(
            f"a product in fp8 ({recipe}) fails on {device.type} with torch {torch.__version__}: {error}",
            where=WHERE,
            fix=f"another version of torchao, which has kernels for this torch, or {OFF}",
        ) from error


def _multiply(recipe: str, emulate: bool, splits_backward: bool = False, shards: Shards | None = None) -> Multiply:
    """Returns the function that multiplies in fp8.

    Args:
        splits_backward: see ``use_float8``.
        shards: None means that this rank holds the whole weight.

    Raises:
        UserError: torchao is missing, or too old.
    """
    try:
        if not emulate:
            _correct_compiler()
        return _product_of(recipe, emulate, splits_backward, shards)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"precision.fp8={recipe} needs torchao 0.18, which cannot be imported: {error}",
            where=WHERE,
            fix=f"{how_to_install('torchao', 'fp8')}, or {OFF}",
        ) from error


def _product_of(recipe: str, emulate: bool, splits_backward: bool, shards: Shards | None) -> Multiply:
    from hpc_train.parallel.precision.float8_products import multiply

    if recipe == "mxfp8":
        from hpc_train.parallel.precision.float8_blocks import BlockProducts

        return partial(multiply, BlockProducts(emulate), splits_backward)
    from hpc_train.parallel.precision.float8_products import scaled_products

    return partial(multiply, scaled_products(recipe, emulate, shards), splits_backward)


def _correct_compiler() -> None:
    """Makes torchao change a part of torch's compiler that miscompiles casts to fp8 (triton-lang/triton#11111), which
    it does when it is asked to convert a model.
    """
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(nn.Identity())
