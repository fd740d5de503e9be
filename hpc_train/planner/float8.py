"""The time of matrix products in fp8: they run at the rate of fp8, and their operands are cast. Imports no torch.

Each product and each of its two gradients scales and casts both operands anew (``parallel/precision/float8.py``). What
the casts move was counted in torchao 0.18 as the bytes that all kernels read and write, per value of an operand:

- Compiled, as torch 2.13's Inductor counts them for one product with its gradients. ``tensorwise`` reads an operand
  for its largest magnitude and again for each of two layouts, which have a byte per value: 2 + 2 (2 + 1). ``rowwise``
  needs the magnitudes of rows and of columns as well.
- ``mxfp8`` has a kernel for each layout, which reads an operand once.
- Not compiled, each operation is a kernel, most of them in fp32: 33 bytes for each cast, and 2 to transpose the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpc_train.config.extensions import family_of
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.layout.counted import CountedModel, counted
from hpc_train.layout.float8 import OFF, WHERE, Products, check_gpus
from hpc_train.layout.layout import Layout
from hpc_train.planner.machine import Machine


@dataclass(frozen=True)
class Casts:
    """Counts what the casts of one product move, in bytes per value, and the kernels that they take.

    Attributes:
        forward, backward: of the input and of the weight, in each pass.
        gradient: of the gradient of the result, in the backward.
        kernels: in the forward and in the backward.
    """

    forward: float
    backward: float
    gradient: float
    kernels: tuple[int, int]


_OF_BLOCKS = 2 + 1 + 1 / 32  # mxfp8 writes the scale of each block, too
COMPILED = {
    "tensorwise": Casts(5, 3, 8, (4, 8)),
    "rowwise": Casts(6, 4, 6, (20, 15)),
    "mxfp8": Casts(_OF_BLOCKS, _OF_BLOCKS, 2 * _OF_BLOCKS, (2, 4)),
}
EAGER = {
    "tensorwise": Casts(33, 35, 68, (22, 47)),
    "rowwise": Casts(33, 35, 68, (28, 59)),
    "mxfp8": COMPILED["mxfp8"],
}


@dataclass(frozen=True)
class Float8:
    """The products of a layer in fp8, of the mean layer if ``precision.fp8_skip`` names some layers.

    Attributes:
        share: of the operations of all its products.
        forward, backward: bytes that the casts of a micro-batch move on one rank.
        kernels: of these casts, in the forward and in the backward.
    """

    share: float
    forward: float
    backward: float
    kernels: tuple[int, int]


IN_BF16 = Float8(0.0, 0.0, 0.0, (0, 0))


def float8_of(config: Config, layout: Layout, tokens: int) -> Float8:
    """Returns the products of the mean layer in fp8, or of the stem of a model without layers, which counts as a whole;
    none of them if neither the family of the model nor its counts tell its linear layers.

    Args:
        tokens: the positions of a sample.
    """
    recipe = config.precision.fp8
    if recipe is None:
        return IN_BF16
    model: Any = counted(config).model
    known = products_of(model, tokens)
    if known is None:
        return IN_BF16
    layers = max(1, model.n_layers)
    casts = (COMPILED if config.train.compile else EAGER)[recipe]
    chosen = forward = backward = 0.0
    kernels = [0.0, 0.0]
    for group in known:
        shares = [count / layers for count in group.chosen(config.precision)]
        rows = layout.micro_size * group.rows / layout.cp
        in_fp8 = sum(share * group.inputs * outputs for share, outputs in zip(shares, group.outputs, strict=True))
        # the compiler casts an input once that several products share
        inputs = rows * group.inputs * (max(shares) if config.train.compile else sum(shares))
        results = rows * sum(share * outputs for share, outputs in zip(shares, group.outputs, strict=True))
        forward += casts.forward * (inputs + in_fp8) / layout.tp
        backward += (casts.backward * (inputs + in_fp8) + casts.gradient * results) / layout.tp
        kernels = [have + sum(shares) * more for have, more in zip(kernels, casts.kernels, strict=True)]
        chosen += 2 * group.rows * in_fp8
    share = chosen * layers / (_operations(model, known) or 1.0)
    return Float8(share, forward, backward, (round(kernels[0]), round(kernels[1])))


def products_of(model: Any, tokens: int) -> Sequence[Products] | None:
    """Returns the linear layers of all layers of ``model``; None if they are unknown."""
    if isinstance(model, CountedModel):
        return model.counts.products
    tell = family_of(model).linear_layers
    groups = None if tell is None else tell(model)
    if groups is None:
        return None
    numbers = range(model.n_layers)
    found = list[Products]()
    for group in groups:
        names = tuple(tuple(f"{group.layer.format(number)}.{name}" for number in numbers) for name in group.names)
        found.append(Products(names, group.inputs, group.outputs, tokens))
    return found


def _operations(model: Any, known: Sequence[Products]) -> float:
    """Returns the operations of the forward of a sample in all products of the layers, with those that stay in bf16."""
    if isinstance(model, CountedModel):
        return sum(block.products for block in model.layers or model.counts.blocks[:1])
    return sum(2 * group.rows * group.inputs * sum(group.outputs) * len(group.names[0]) for group in known)


def check_float8_rate(config: Config, machine: Machine) -> None:
    """Checks that the time of products in fp8 can be predicted.

    Raises:
        UserError: the GPUs have no units for this scaling, or their rate is unknown. CPUs emulate it.
    """
    check_gpus(config, {machine.device})
    if config.precision.fp8 is None or machine.rates.cores or machine.rates.fp8_flops:
        return
    raise UserError(
        f"precision.fp8 is {config.precision.fp8}, but {machine.name} ({machine.device}) has no rate of fp8",
        where=f"{WHERE}, --machine",
        fix=f"{OFF}; or add fp8_flops to the machine file if its GPUs have units for fp8",
    )


def why_not_predicted(config: Config, machine: Machine) -> str | None:
    """Returns a sentence if the times are those of bf16 although the config computes in fp8; None if they are not."""
    if config.precision.fp8 is None:
        return None
    if machine.rates.cores:
        return "times are those of bf16: CPUs emulate fp8, which is slower"
    if products_of(counted(config).model, 1) is None:
        return f"times are those of bf16: the linear layers of this model of kind {config.model.kind} are unknown"
    return None
